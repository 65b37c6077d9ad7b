"""The conformance suite: our kernels pass it, and each way of breaking one fails it where it should."""

import pytest
import torch
from torch import Tensor

from knapformer.attention import KERNELS, Segments
from knapformer.attention.conformance import CASES, KernelConformanceError, check_attention_kernel
from knapformer.attention.kernels import sdpa_loop
from knapformer.errors import SpecError

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_on_the_cpu(dtype: torch.dtype, seed: int) -> None:
    check_attention_kernel(sdpa_loop, CPU, dtype, seed=seed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_kernels_on_cuda(name: str, dtype: torch.dtype) -> None:
    entry, device = KERNELS[name], torch.device("cuda", 0)
    obstacle = entry.obstacle(device, dtype)
    if obstacle is not None:
        pytest.skip(f"{name} {obstacle}")
    try:
        if entry.load is not None:
            entry.load()
    except ImportError as error:
        pytest.skip(str(error))
    check_attention_kernel(entry.kernel, device, dtype)


def test_what_is_covered() -> None:
    """So that a case which a kernel is known to trip over does not get lost."""
    assert any(n % 128 == 64 and c.first_logit is not None and c.first_logit < -89 for c in CASES for n in c.q_lens)
    assert {c.head_dim for c in CASES} >= {16, 64, 128}
    assert {c.heads % 2 for c in CASES} == {0, 1}
    for empty in ([], [0]):
        assert any(list(c.q_lens[:1]) == empty for c in CASES)
    assert any(0 in c.k_lens and sum(c.q_lens) for c in CASES)
    assert any(c.fused for c in CASES) and any(c.flat_gradient for c in CASES)
    assert any(max(c.q_lens, default=0) == 1 and 0 in c.q_lens for c in CASES)


# -- broken kernels -------------------------------------------------------------------------------------------------


def leaks(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, k, v, Segments.of([len(q)], [len(k)], CPU), scale)


def unscaled(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, k, v, segments, 1.0)


def ignores_the_scale(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, k, v, segments, None)


def drops_the_last_key(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    lens = segments.cu_k.diff()
    kept = [i for a, n in zip(segments.cu_k.tolist(), lens.tolist(), strict=False) for i in range(a, a + max(n - 1, 1))]
    index = torch.tensor([i for i in kept if i < len(k)], dtype=torch.long)
    shorter = torch.where(lens > 1, lens - 1, lens)
    return sdpa_loop(q, k[index], v[index], Segments.of(segments.cu_q.diff().tolist(), shorter.tolist(), CPU), scale)


def nan_without_keys(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    alone = torch.repeat_interleave(segments.cu_k.diff() == 0, segments.cu_q.diff())
    return sdpa_loop(q, k, v, segments, scale).masked_fill(alone[:, None, None], float("nan"))


def nan_gradients(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """The backward that keeps exp(logsumexp): 0 / 0 where it underflows, at the lengths that this happens at."""
    o = sdpa_loop(q, k, v, segments, scale)
    if o.requires_grad and segments.max_q % 128 == 64 and float((q * k[:1]).detach().sum(2).max()) < -1000:
        o.register_hook(lambda grad: grad * float("nan"))
    return o


def detaches_v(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, k, v.detach(), segments, scale)


def forgets_the_graph_without_segments(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None
) -> Tensor:
    return sdpa_loop(q, k, v, segments, scale) if len(segments) else q[:0].clone()


def half_a_gradient_of_k(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, (k + k.detach()) / 2, v, segments, scale)


def assumes_contiguous(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    def raw(x: Tensor) -> Tensor:
        return x if x.is_contiguous() else x.as_strided(x.shape, (x[0].numel(), x.shape[2], 1), x.storage_offset())

    return sdpa_loop(raw(q), raw(k), raw(v), segments, scale)


def scales_q_in_place(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    q.data.mul_(2.0)
    return sdpa_loop(q / 2, k, v, segments, scale)


def in_single_precision(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q.float(), k.float(), v.float(), segments, scale)


def drops_trailing_queries(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    return sdpa_loop(q, k, v, segments, scale)[:-1]


def refuses_single_rows(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    if segments.max_q == 1:
        raise ValueError("shape '[1, 3]' is invalid")
    return sdpa_loop(q, k, v, segments, scale)


BROKEN = [
    (leaks, "odd lengths: the output differs by up to"),
    (unscaled, "one segment: the output differs by up to"),
    (ignores_the_scale, "a scale of 0.3: the output differs by up to"),
    (drops_the_last_key, "one query each, many keys: the output differs by up to"),
    (nan_without_keys, "segments without keys: the output is not finite in"),
    (nan_gradients, "logits near -120, length 192: the gradient of q is not finite"),
    (detaches_v, "one segment: the gradient of v is None: it left the autograd graph"),
    (forgets_the_graph_without_segments, "no segments: the gradient of k is None: it left the autograd graph"),
    (half_a_gradient_of_k, "one segment: the gradient of k differs by up to"),
    (assumes_contiguous, "views of a fused tensor: the output differs by up to"),
    (scales_q_in_place, "one segment: changed its inputs"),
    (drops_trailing_queries, "one segment: output is (47, 3, 64)"),
    (refuses_single_rows, "one row: raised ValueError: shape '[1, 3]' is invalid"),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("broken", "finding"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_kernel_is_found(broken, finding: str, dtype: torch.dtype) -> None:
    with pytest.raises(KernelConformanceError) as caught:
        check_attention_kernel(broken, CPU, dtype)
    head, *failures = str(caught.value).split("\n  ")
    assert head == f"attention kernel {broken.__name__!r} fails {len(failures)} checks in {dtype} on cpu:"
    assert any(failure.startswith(finding) for failure in failures), failures


@pytest.mark.parametrize(
    ("broken", "good"),
    [
        (ignores_the_scale, "one segment"),
        (nan_without_keys, "odd lengths"),
        (forgets_the_graph_without_segments, "one row"),
        (assumes_contiguous, "one segment"),
        (nan_gradients, "one segment"),
        (refuses_single_rows, "one segment"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_only_what_is_broken_is_reported(broken, good: str) -> None:
    with pytest.raises(KernelConformanceError) as caught:
        check_attention_kernel(broken, CPU, torch.float32)
    assert f"\n  {good}: " not in str(caught.value)


def test_too_little_precision_is_found() -> None:
    with pytest.raises(KernelConformanceError, match=r"one segment: output is .* torch.float32 on cpu, not"):
        check_attention_kernel(in_single_precision, CPU, torch.float64)

    def in_bf16(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
        return sdpa_loop(q.bfloat16(), k.bfloat16(), v.bfloat16(), segments, scale).to(q.dtype)

    with pytest.raises(KernelConformanceError, match=r"error of 0.00\d+ where 1e-05 is allowed"):
        check_attention_kernel(in_bf16, CPU, torch.float32)


def test_a_dtype_without_a_tolerance() -> None:
    with pytest.raises(SpecError, match=r"no tolerance is known for torch.int64; kernels are checked in torch.float64"):
        check_attention_kernel(sdpa_loop, CPU, torch.int64)
