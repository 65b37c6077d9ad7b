"""The reference kernel against a plain fp64 softmax, the segments it is told, and which kernel is chosen when."""

import math
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from knapformer.attention import KERNELS, Segments, choose_kernel, register_kernel
from knapformer.attention.conformance import check_attention_kernel
from knapformer.attention.kernels import flash, flash_attn, flash_attn_3, registry, sdpa, sdpa_loop, varlen
from knapformer.errors import BackendUnavailableError, KnapFormerWarning, SpecError

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
    attention = sdpa.F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        seen.append(tuple(q.shape))
        return attention(q, k, v, **options)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", counted)
    sdpa_loop(*random_qkv(sum(lens), sum(lens)), Segments.of(lens, lens, CPU))
    assert len(seen) == calls
    assert sum(shape[0] for shape in seen) == len(lens)


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "q_rows", "k_rows"),
    [
        ([0, 3], [4, 2], [0, 1, 2], [4, 5]),
        ([2, 0, 0, 5], [2, 4, 4, 5], range(7), [0, 1, 10, 11, 12, 13, 14]),
        ([1, 2, 4], [0, 3, 0], [1, 2], [0, 1, 2]),
        ([0, 0], [3, 3], [], []),
    ],
)
def test_segments_with_nothing_to_compute_are_left_out(q_lens, k_lens, q_rows, k_rows) -> None:
    filled = Segments.of(q_lens, k_lens, CPU).filled
    assert filled is not None
    assert (filled.q_index.tolist(), filled.k_index.tolist()) == (list(q_rows), list(k_rows))
    assert filled.segments.num_q == len(q_rows)
    assert filled.segments.filled is None


@pytest.mark.parametrize("lens", [[], [3], [5, 5, 1]])
def test_full_segments_are_used_as_they_are(lens: list[int]) -> None:
    assert Segments.of(lens, lens, CPU).filled is None


def test_cudnn_is_left_out_and_the_users_choice_is_kept() -> None:
    """On CUDA; the flags exist without it."""
    flags = torch.backends.cuda
    with sdpa._without_cudnn("cuda"):
        assert not flags.cudnn_sdp_enabled()
        assert flags.flash_sdp_enabled() and flags.mem_efficient_sdp_enabled() and flags.math_sdp_enabled()
    with sdpa_kernel(SDPBackend.MATH), sdpa._without_cudnn("cuda"):
        assert flags.math_sdp_enabled()
        assert not (flags.cudnn_sdp_enabled() or flags.flash_sdp_enabled() or flags.mem_efficient_sdp_enabled())
    assert flags.cudnn_sdp_enabled()


# -- flash kernels, with the function that does the work replaced by one that runs here ------------------------------


class Flash:
    """Stands for a package's `flash_attn_varlen_func`: attends by SDPA and remembers how it was called."""

    def __init__(self, *, returns_tuple: bool = False) -> None:
        self.calls: list[dict] = []
        self.returns_tuple = returns_tuple

    def attend(self, q, k, v, cu_q, cu_k, max_q, max_k, scale, options):
        self.calls.append({"qkv": (q, k, v), "max": (max_q, max_k), "scale": scale, **options})
        segments = Segments.of(cu_q.diff().numpy(), cu_k.diff().numpy(), CPU)
        assert (segments.max_q, segments.max_k) == (max_q, max_k)
        output = sdpa_loop(q, k, v, segments, scale)
        return (output, None) if self.returns_tuple else output

    def varlen_attn(self, q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return self.attend(q, k, v, cu_q, cu_k, max_q, max_k, scale, {"window_size": window_size})

    def with_determinism(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, deterministic=False
    ):
        options = {"deterministic": deterministic}
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return self.attend(q, k, v, *ends, softmax_scale, options)

    def without_determinism(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None):
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return self.attend(q, k, v, *ends, softmax_scale, {})


FLASH_KERNELS = {"varlen": varlen, "flash_attn": flash_attn, "flash_attn_3": flash_attn_3}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Flash:
    function = Flash()
    functions = {"varlen": function.varlen_attn, "flash_attn": function.with_determinism}
    monkeypatch.setattr(flash, "_loaded", functions | {"flash_attn_3": function.with_determinism})
    return function


@pytest.mark.parametrize("kernel", FLASH_KERNELS.values(), ids=FLASH_KERNELS)
def test_flash_kernels_hand_over_what_they_are_given(kernel, installed: Flash) -> None:
    check_attention_kernel(kernel, CPU, torch.float32)


@pytest.mark.parametrize("kernel", FLASH_KERNELS.values(), ids=FLASH_KERNELS)
def test_flash_kernels_never_see_an_empty_segment(kernel, installed: Flash) -> None:
    qkv = random_qkv(5, 9, dim=8)
    kernel(*qkv, Segments.of([0, 1, 0, 4], [2, 3, 0, 4], CPU), None)
    kernel(*qkv, Segments.of([0, 5, 0], [0, 0, 9], CPU), None)
    assert [call["max"] for call in installed.calls] == [(4, 4)]
    assert [len(x) for x in installed.calls[0]["qkv"]] == [5, 7, 7]


@pytest.mark.parametrize("kernel", FLASH_KERNELS.values(), ids=FLASH_KERNELS)
@pytest.mark.parametrize("dim", [1, 5, 72, 100])
def test_heads_are_padded_to_16_bytes(kernel, dim: int, installed: Flash) -> None:
    qkv = random_qkv(9, 9, dim=dim)
    output = kernel(*qkv, Segments.of([4, 5], [4, 5], CPU), None)
    assert float((output - naive(*qkv, [4, 5], [4, 5], None)).detach().abs().max()) < 1e-12
    assert all(x.shape[2] % 8 == 0 for x in installed.calls[0]["qkv"])


def test_aligned_views_are_not_copied(installed: Flash) -> None:
    fused = torch.randn(9, 3, 2, 16)
    segments = Segments.of([9], [9], CPU)
    varlen(*fused.unbind(1), segments, None)
    assert [x.data_ptr() for x in installed.calls[0]["qkv"]] == [x.data_ptr() for x in fused.unbind(1)]
    odd = torch.randn(9, 3, 2, 19)[..., 1:17]
    varlen(*odd.unbind(1), segments, None)
    assert all(x.is_contiguous() for x in installed.calls[1]["qkv"])


@pytest.mark.parametrize("kernel", FLASH_KERNELS.values(), ids=FLASH_KERNELS)
def test_a_head_dim_beyond_256(kernel, installed: Flash) -> None:
    name = kernel.__name__
    with pytest.raises(BackendUnavailableError, match=f"'{name}' takes head dims up to 256, got 264; use kernel="):
        kernel(*random_qkv(3, 3, dim=264), Segments.of([3], [3], CPU), None)


def test_a_tuple_is_taken_apart(installed: Flash) -> None:
    installed.returns_tuple = True
    qkv = random_qkv(3, 3, dim=8)
    assert flash_attn_3(*qkv, Segments.of([3], [3], CPU), None).shape == (3, 3, 8)


def test_cudnn_is_kept_out_of_newer_varlen(installed: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, segments = random_qkv(9, 12, dim=8), Segments.of([4, 5], [7, 5], CPU)
    for may, window in ((False, (-1, -1)), (True, (7, 7))):
        monkeypatch.setattr(flash, "_MAY_USE_CUDNN", may)
        varlen(*qkv, segments, None)
        assert installed.calls[-1]["window_size"] == window


@pytest.fixture
def deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_determinism_is_asked_for(installed: Flash, deterministic: None) -> None:
    call = random_qkv(3, 3, dim=8), Segments.of([3], [3], CPU)
    for kernel in (flash_attn, flash_attn_3):
        for wanted in (False, True):
            torch.use_deterministic_algorithms(wanted)
            kernel(*call[0], call[1], None)
            assert installed.calls[-1]["deterministic"] is wanted


def test_determinism_that_a_package_does_not_offer(monkeypatch: pytest.MonkeyPatch, deterministic: None) -> None:
    monkeypatch.setattr(flash, "_loaded", {"flash_attn": Flash().without_determinism})
    call = random_qkv(3, 3, dim=8), Segments.of([3], [3], CPU)
    flash_attn(*call[0], call[1], None)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(BackendUnavailableError, match="'flash_attn': the installed version has no deterministic"):
        flash_attn(*call[0], call[1], None)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(KnapFormerWarning, match="gradients will differ between runs"):
        flash_attn(*call[0], call[1], None)


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
        ("flash_attn", "cuda", torch.bfloat16, flash_attn),
        ("flash_attn_3", "cuda", torch.float16, flash_attn_3),
    ],
)
def test_choice(name: str | None, device: str, dtype: torch.dtype, kernel, installed: Flash) -> None:
    assert choose_kernel(name, torch.device(device), dtype) is kernel


def test_the_default_takes_every_head_dim() -> None:
    cuda = torch.device("cuda")
    assert choose_kernel(None, cuda, torch.bfloat16, head_dim=256) is varlen
    assert choose_kernel(None, cuda, torch.bfloat16, head_dim=264) is sdpa_loop
    with pytest.raises(BackendUnavailableError, match="'varlen' takes head dims up to 256, got 264; use kernel="):
        choose_kernel("varlen", cuda, torch.bfloat16, head_dim=264)


def test_an_unknown_kernel() -> None:
    known = "flash_attn, flash_attn_3, sdpa_loop, varlen"
    with pytest.raises(SpecError, match=f"unknown attention kernel 'flash'; known kernels are {known}"):
        choose_kernel("flash", CPU, torch.float32)


@pytest.mark.parametrize("name", FLASH_KERNELS)
@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("cpu", torch.float32), ("cuda", torch.float32)]
)
def test_an_explicit_choice_is_never_replaced(name: str, device: str, dtype: torch.dtype) -> None:
    with pytest.raises(
        BackendUnavailableError, match=f"'{name}' needs fp16 or bf16 on CUDA, got {dtype} on {device}; use kernel="
    ):
        choose_kernel(name, torch.device(device), dtype)


@pytest.mark.parametrize(
    ("capability", "default", "refused"),
    [
        ((7, 5), sdpa_loop, {"varlen": "8.0 or more", "flash_attn": "8.0 or more", "flash_attn_3": "9.0 or more"}),
        ((8, 6), varlen, {"flash_attn_3": "9.0 or more"}),
        ((9, 0), varlen, {}),
        ((10, 0), varlen, {"flash_attn_3": "up to 9.9"}),
    ],
)
def test_compute_capability(capability, default, refused, installed: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_capability", lambda index: capability)
    cuda = torch.device("cuda:0")
    assert choose_kernel(None, cuda, torch.bfloat16) is default
    for name, kernel in FLASH_KERNELS.items():
        if name in refused:
            with pytest.raises(BackendUnavailableError, match=f"'{name}' needs compute capability {refused[name]}"):
                choose_kernel(name, cuda, torch.bfloat16)
        else:
            assert choose_kernel(name, cuda, torch.bfloat16) is kernel


@pytest.mark.parametrize(
    ("name", "module", "needs"),
    [
        ("varlen", "torch.nn.attention.varlen", "torch 2.11 or newer"),
        ("flash_attn", "flash_attn", "the package flash-attn 2"),
        ("flash_attn_3", "flash_attn_interface", "the package flash-attn 3"),
    ],
)
def test_a_kernel_whose_package_is_missing(name, module, needs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where it is chosen, and also where it is called."""
    monkeypatch.setattr(flash, "_loaded", {})
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"attention kernel '{name}' needs {module}\.\w+ of {needs}.*ModuleNotFoundError.*use kernel='sdpa_loop'"
    with pytest.raises(BackendUnavailableError, match=message):
        choose_kernel(name, torch.device("cuda"), torch.bfloat16)
    with pytest.raises(BackendUnavailableError, match=message):
        FLASH_KERNELS[name](*random_qkv(3, 3), Segments.of([3], [3], CPU), None)


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
    assert KERNELS[spare_name].kernel is one_segment


def test_a_registered_kernel_says_where_it_runs(spare_name: str) -> None:
    def load() -> None:
        raise BackendUnavailableError("no such package")

    register_kernel(spare_name, one_segment, device_types=("cpu",), dtypes=(torch.float32,), max_head_dim=8, load=load)
    for device, dtype, head_dim, message in (
        ("cuda", torch.float32, 8, "needs fp32 on cpu, got torch.float32 on cuda"),
        ("cpu", torch.bfloat16, 8, "needs fp32 on cpu, got torch.bfloat16 on cpu"),
        ("cpu", torch.float32, 9, "takes head dims up to 8, got 9"),
        ("cpu", torch.float32, 8, "no such package"),
    ):
        with pytest.raises(BackendUnavailableError, match=message):
            choose_kernel(spare_name, torch.device(device), dtype, head_dim=head_dim)


def test_the_built_in_kernels_cannot_be_replaced() -> None:
    for name, kernel in (FLASH_KERNELS | {"sdpa_loop": sdpa_loop}).items():
        with pytest.raises(SpecError, match=f"'{name}' is already registered"):
            register_kernel(name, one_segment)
        assert KERNELS[name].kernel is kernel
