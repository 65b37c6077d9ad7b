"""The reference kernel against a plain fp64 softmax, the segments it is told, and which kernel is chosen when."""

import math
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from knapformer.attention import KERNELS, Segments, choose_kernel, kernels, register_kernel
from knapformer.attention.kernels import sdpa_loop, varlen
from knapformer.errors import BackendUnavailableError, SpecError

CPU = torch.device("cpu")

LENGTHS = [
    ([1], [1]),
    ([7], [7]),
    ([13, 1, 64, 65], [13, 1, 64, 65]),
    ([5, 5, 5, 3, 3, 5], [5, 5, 5, 3, 3, 5]),  # runs of equal segments
    ([3, 1, 8], [7, 9, 2]),  # q and k of other lengths
    ([4, 4, 4], [6, 6, 2]),  # equal queries, other keys: two runs
    ([4, 4, 2], [6, 6, 6]),
    ([1] * 9, [17] * 9),
    ([129], [31]),
    ([0, 3], [4, 2]),  # keys but no queries
    ([2, 0, 0, 5], [2, 4, 4, 5]),
    ([0, 0], [3, 3]),
    ([0], [0]),
    ([], []),
]
"""(queries, keys) of the segments, every one with a key for its queries."""


def naive(q: Tensor, k: Tensor, v: Tensor, q_lens: Sequence[int], k_lens: Sequence[int], scale: float | None) -> Tensor:
    """Softmax attention in fp64, one segment and head at a time."""
    q, k, v = q.double(), k.double(), v.double()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    rows, i, j = [q[:0] + k[:0] + v[:0]], 0, 0
    for nq, nk in zip(q_lens, k_lens, strict=True):
        heads = []
        for h in range(q.shape[1]):
            weights = torch.exp(scale * q[i : i + nq, h] @ k[j : j + nk, h].T)
            heads.append((weights / weights.sum(1, keepdim=True)) @ v[j : j + nk, h])
        rows.append(torch.stack(heads, 1))
        i, j = i + nq, j + nk
    return torch.cat(rows)


def random_qkv(nq: int, nk: int, dtype: torch.dtype = torch.float64, heads: int = 3, dim: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(nq * 1000 + nk)
    shapes = ((nq, heads, dim), (nk, heads, dim), (nk, heads, dim))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def gradients(output: Tensor, qkv: list[Tensor]) -> list[Tensor]:
    weights = torch.arange(output.numel(), dtype=torch.float64).sin().reshape(output.shape)
    return list(torch.autograd.grad((output.double() * weights).sum(), qkv))


def error(
    kernel, q_lens: Sequence[int], k_lens: Sequence[int], dtype: torch.dtype, scale: float | None = None
) -> float:
    """Largest difference of outputs and of all gradients from the naive ones."""
    qkv = random_qkv(sum(q_lens), sum(k_lens), dtype)
    got = kernel(*qkv, Segments.of(q_lens, k_lens, CPU), scale)
    expected = naive(*qkv, q_lens, k_lens, scale)
    assert got.shape == expected.shape and got.dtype == dtype
    pairs = [(got, expected), *zip(gradients(got, qkv), gradients(expected, qkv), strict=True)]
    return max([0.0] + [float((a.double() - b.double()).detach().abs().max()) for a, b in pairs if a.numel()])


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize(("q_lens", "k_lens"), LENGTHS)
def test_outputs_and_gradients(
    q_lens: list[int], k_lens: list[int], dtype: torch.dtype, tolerance: float, scale: float | None
) -> None:
    assert error(sdpa_loop, q_lens, k_lens, dtype, scale) < tolerance


def shifted(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, k.roll(1, 0), v.roll(1, 0), segments, scale)  # a key of the neighbour instead of one's own


def keys_swapped(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, k, v.flip(0), segments, scale)


def unscaled(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, k, v, segments, 1.0)


def one_segment(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, k, v, Segments.of([len(q)], [len(k)], CPU), scale)


def no_gradient_of_k(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, k.detach() + 0 * k, v, segments, scale)


@pytest.mark.parametrize("broken", [shifted, keys_swapped, unscaled, one_segment, no_gradient_of_k])
@pytest.mark.parametrize(("q_lens", "k_lens"), [([13, 1, 64], [13, 1, 64]), ([3, 1, 8], [7, 9, 2])])
def test_the_comparison_can_fail(broken, q_lens: list[int], k_lens: list[int]) -> None:
    assert error(broken, q_lens, k_lens, torch.float64) > 0.01


@pytest.mark.parametrize("heads", [1, 7, 24])
@pytest.mark.parametrize("dim", [1, 8, 64])
def test_any_heads_and_head_dim(heads: int, dim: int) -> None:
    qkv = random_qkv(9, 12, heads=heads, dim=dim)
    got = sdpa_loop(*qkv, Segments.of([4, 5], [7, 5], CPU))
    assert float((got - naive(*qkv, [4, 5], [7, 5], None)).detach().abs().max()) < 1e-12


@pytest.mark.parametrize(("q_lens", "k_lens"), [([3], [0]), ([2, 3], [2, 0]), ([3, 3], [0, 0]), ([1, 2, 4], [0, 3, 0])])
def test_queries_without_keys_give_zeros(q_lens: list[int], k_lens: list[int]) -> None:
    """A mean of nothing is taken as 0, in outputs and gradients: never NaN. No placement asks for it."""
    qkv = random_qkv(sum(q_lens), sum(k_lens))
    got = sdpa_loop(*qkv, Segments.of(q_lens, k_lens, CPU))
    alone = torch.cat([torch.full((nq,), nk == 0) for nq, nk in zip(q_lens, k_lens, strict=True)])
    assert (got[alone] == 0).all()
    assert (got[~alone] != 0).all()
    grads = gradients(got, qkv)
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert (grads[0][alone] == 0).all()


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("kernel", [sdpa_loop, varlen])
def test_no_segments_keep_q_k_and_v_in_the_graph(kernel, rows: int) -> None:
    """A rank without work takes part in the backward pass; its gradients are zeros, not None."""
    qkv = [torch.randn(rows, 3, 5, requires_grad=True) for _ in range(3)]
    got = kernel(*qkv, Segments.of([], [], CPU), None)
    assert got.shape == (0, 3, 5)
    got.sum().backward()
    for x in qkv:
        assert x.grad is not None and x.grad.shape == (rows, 3, 5) and (x.grad == 0).all()


def test_a_kernel_that_drops_its_inputs_is_noticed() -> None:
    q = torch.randn(0, 3, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.zeros(0, 3, 5).sum().backward()
    q[:0].sum().backward()
    assert q.grad is not None


# -- segments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "runs"),
    [
        ([], [], ()),
        ([4], [4], ((0, 0, 1, 4, 4),)),
        ([4, 4, 4], [4, 4, 4], ((0, 0, 3, 4, 4),)),
        ([4, 4, 2, 4], [4, 4, 2, 4], ((0, 0, 2, 4, 4), (8, 8, 1, 2, 2), (10, 10, 1, 4, 4))),
        ([4, 4, 4], [6, 6, 2], ((0, 0, 2, 4, 6), (8, 12, 1, 4, 2))),
        ([4, 4, 2], [6, 6, 6], ((0, 0, 2, 4, 6), (8, 12, 1, 2, 6))),
        ([0, 0, 1], [3, 3, 3], ((0, 0, 2, 0, 3), (0, 6, 1, 1, 3))),
    ],
)
def test_runs_of_equal_segments(q_lens: list[int], k_lens: list[int], runs: tuple) -> None:
    segments = Segments.of(q_lens, k_lens, CPU)
    assert segments.runs == runs
    assert len(segments) == len(q_lens)
    assert segments.cu_q.tolist() == [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    assert segments.cu_k.tolist() == [sum(k_lens[:i]) for i in range(len(k_lens) + 1)]
    assert segments.cu_q.dtype == segments.cu_k.dtype == torch.int32
    assert (segments.num_q, segments.max_q, segments.max_k) == (sum(q_lens), max([0, *q_lens]), max([0, *k_lens]))


@pytest.mark.parametrize(("lens", "calls"), [([5] * 100, 1), ([5, 5, 3, 3, 3, 5], 3), ([1, 2, 3], 3), ([], 0)])
def test_equal_neighbours_are_one_call(lens: list[int], calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    attention = kernels.F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        seen.append(tuple(q.shape))
        return attention(q, k, v, **options)

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", counted)
    sdpa_loop(*random_qkv(sum(lens), sum(lens)), Segments.of(lens, lens, CPU))
    assert len(seen) == calls
    assert sum(shape[0] for shape in seen) == len(lens)


# -- choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "device", "dtype", "kernel"),
    [
        (None, "cpu", torch.float32, sdpa_loop),
        (None, "cpu", torch.bfloat16, sdpa_loop),
        (None, "cuda", torch.float32, sdpa_loop),
        (None, "cuda", torch.bfloat16, varlen),
        (None, "cuda", torch.float16, varlen),
        ("sdpa_loop", "cpu", torch.float64, sdpa_loop),
        ("sdpa_loop", "cuda", torch.bfloat16, sdpa_loop),
        ("varlen", "cuda", torch.bfloat16, varlen),
    ],
)
def test_choice(name: str | None, device: str, dtype: torch.dtype, kernel) -> None:
    assert choose_kernel(name, torch.device(device), dtype) is kernel


def test_an_unknown_kernel() -> None:
    with pytest.raises(SpecError, match="unknown attention kernel 'flash'; known kernels are sdpa_loop, varlen"):
        choose_kernel("flash", CPU, torch.float32)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("cpu", torch.float32), ("cuda", torch.float32)]
)
def test_an_explicit_choice_is_never_replaced(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(BackendUnavailableError, match=f"'varlen' needs fp16 or bf16 on CUDA, got {dtype} on {device}"):
        choose_kernel("varlen", torch.device(device), dtype)


def test_varlen_without_the_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels._varlen_attn.cache_clear()
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(BackendUnavailableError, match=r"needs torch.nn.attention.varlen of torch 2.11 or newer"):
        varlen(*random_qkv(3, 3), Segments.of([3], [3], CPU), None)
    kernels._varlen_attn.cache_clear()


@pytest.fixture
def spare_name() -> Iterator[str]:
    yield "kernel of a test"
    KERNELS.pop("kernel of a test", None)


def test_registering_a_kernel(spare_name: str) -> None:
    with pytest.raises(SpecError, match="unknown attention kernel"):
        choose_kernel(spare_name, CPU, torch.float32)
    register_kernel(spare_name, one_segment)
    assert choose_kernel(spare_name, CPU, torch.float32) is one_segment
    with pytest.raises(
        SpecError, match="attention kernel 'kernel of a test' is already registered; choose another name"
    ):
        register_kernel(spare_name, sdpa_loop)
    assert KERNELS[spare_name] is one_segment


def test_the_built_in_kernels_cannot_be_replaced() -> None:
    for name in ("sdpa_loop", "varlen"):
        with pytest.raises(SpecError, match=f"'{name}' is already registered"):
            register_kernel(name, one_segment)
    assert (KERNELS["sdpa_loop"], KERNELS["varlen"]) == (sdpa_loop, varlen)
