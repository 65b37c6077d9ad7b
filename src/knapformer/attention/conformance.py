"""What every attention kernel must get right, as one call: `check_attention_kernel(kernel, device, dtype)`.

Outputs and gradients are compared with softmax attention written out in fp64. Errors are taken relative to what is
added up, since the rounding of terms does not shrink when they cancel out:

    error = max |kernel - fp64| / magnitude         magnitude: the largest value in that dim of the head, if every term
                                                    is taken as positive (P|v| for the outputs Pv); at least 1
    error <= floor                                  fp64, fp32
    error <= floor + 2 * error of SDPA, <= most     half precision; SDPA in that dtype, on the same inputs

Logits beyond 16 carry rounding in proportion, and count so. The lengths are small: the suite takes seconds, and says
nothing about speed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knapformer.attention.kernels import Kernel, Segments, sdpa_loop
from knapformer.errors import KernelConformanceError, SpecError


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What is allowed in a dtype; see the module's docstring.

    Attributes:
        floor: error allowed at least.
        most: error allowed at most, so that a fault of SDPA excuses no other kernel's.
    """

    floor: float
    most: float


TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 5e-3),
    torch.bfloat16: Tolerance(8e-3, 4e-2),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a kernel.

    Attributes:
        what: the case, in words for a message.
        q_lens, k_lens: of the segments.
        fused: q, k and v are views of one tensor, as after a fused projection. Needs equal lengths.
        first_logit: if given, what the first of the head's dims adds to every logit.
        flat_gradient: the gradient of the outputs has stride 0, as after a sum.
    """

    what: str
    q_lens: Sequence[int]
    k_lens: Sequence[int]
    heads: int = 3
    head_dim: int = 64
    scale: float | None = None
    fused: bool = False
    first_logit: float | None = None
    flat_gradient: bool = False


CASES = (
    Case("one segment", [48], [48]),
    Case("one row", [1], [1]),
    Case("odd lengths", [13, 1, 64, 65, 127, 3], [13, 1, 64, 65, 127, 3]),
    Case("one query each, many keys", [1] * 5, [17, 1, 40, 129, 2]),
    Case("other lengths of queries and keys", [3, 1, 70, 129], [7, 90, 2, 31]),
    Case("many equal segments", [16] * 40, [16] * 40),
    Case("head dim 16, 7 heads", [21, 34, 5], [21, 34, 5], heads=7, head_dim=16),
    Case("head dim 128, 5 heads", [21, 34, 5], [33, 8, 150], heads=5, head_dim=128),
    Case("one head", [21, 34], [21, 34], heads=1),
    Case("a scale of 0.3", [21, 34, 5], [21, 34, 5], scale=0.3),
    Case("segments without queries", [5, 0, 9, 0], [5, 8, 9, 3]),
    Case("segments without keys", [4, 3, 7, 2], [4, 0, 7, 0]),
    Case("segments with neither, and single queries", [0, 1, 0, 1], [0, 3, 0, 5]),
    Case("nothing but segments without keys", [2, 3], [0, 0]),
    Case("nothing but segments without queries", [0, 0], [2, 3]),
    Case("no segments", [], []),
    Case("views of a fused tensor", [21, 34, 5], [21, 34, 5], fused=True),
    Case("a gradient of stride 0", [21, 34, 5], [9, 40, 7], flat_gradient=True),
    *(
        Case(f"logits near -120, length {length}", [length], [length], heads=2, head_dim=128, first_logit=-120.0)
        for length in (64, 192, 320)
    ),
    Case("logits near -120, several lengths", [64, 192, 100, 320], [64, 192, 100, 320], first_logit=-120.0),
    Case("logits near 120", [64, 31], [64, 31], first_logit=120.0),
)


def check_attention_kernel(
    kernel: Kernel, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> None:
    """Run a kernel on every case of `CASES`.

    Raises:
        KernelConformanceError: listing all cases that failed.
        SpecError: for a dtype that the suite has no tolerance for.
    """
    if dtype not in TOLERANCES:
        known = ", ".join(str(known) for known in TOLERANCES)
        raise SpecError(f"no tolerance is known for {dtype}; kernels are checked in {known}")
    device = torch.device(device)
    failures = [f"{case.what}: {failure}" for case in CASES for failure in _failures(kernel, case, device, dtype, seed)]
    if failures:
        name = getattr(kernel, "__name__", type(kernel).__name__)
        head = f"attention kernel {name!r} fails {len(failures)} checks in {dtype} on {device}"
        raise KernelConformanceError("\n  ".join([f"{head}:", *failures]))


def _failures(kernel: Kernel, case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[str]:
    inputs, grad = _inputs(case, device, dtype, seed)
    segments = Segments.of(case.q_lens, case.k_lens, device)
    exact, magnitudes = _exact(case, inputs.qkv(), grad)
    try:
        got = _call(kernel, inputs, segments, case.scale, grad)
        with torch.no_grad():
            plain = kernel(*inputs.qkv(), segments, case.scale)
    except Exception as error:  # whatever a kernel raises is its failure, and other cases may tell more
        yield f"raised {type(error).__name__}: {error}"
        return
    if inputs.changed():
        yield "changed its inputs"
    output = got[0]
    if output.shape != grad.shape or output.dtype != dtype or output.device != grad.device:
        yield (
            f"output is {tuple(output.shape)} {output.dtype} on {output.device}, "
            f"not {tuple(grad.shape)} {dtype} on {grad.device}"
        )
        return
    sdpa = _call(sdpa_loop, inputs, segments, case.scale, grad) if dtype.itemsize == 2 else exact
    tolerance = TOLERANCES[dtype]
    for name, mine, theirs, right, magnitude in zip(_NAMES, got, sdpa, exact, magnitudes, strict=True):
        allowed = min(
            tolerance.most, tolerance.floor + 2 * _error(theirs, right, magnitude)
        )  # `most` if SDPA gives NaN
        if (failure := _difference(mine, right, magnitude, allowed)) is not None:
            yield f"{name} {failure}"
    if (failure := _difference(plain, output.double().cpu(), magnitudes[0], tolerance.floor)) is not None:
        yield f"the output under no_grad {failure}"


def _difference(mine: Tensor | None, right: Tensor, magnitude: Tensor, allowed: float) -> str | None:
    """How a tensor differs from the right one, in words that follow its name."""
    if mine is None:
        return "is None: it left the autograd graph"
    if mine.shape != right.shape:
        return f"has shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    bad = ~torch.isfinite(mine)
    if bad.any():
        return f"is not finite in {int(bad.sum())} of {mine.numel()} values"
    error = _error(mine, right, magnitude)
    if error <= allowed:
        return None
    most = float((mine.double().cpu() - right).abs().max())
    return f"differs by up to {most:.2g}, an error of {error:.2g} where {allowed:.2g} is allowed"


_NAMES = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")


class _Inputs:
    """Leaves of the graph and how q, k and v come from them, with a copy to compare with."""

    def __init__(self, leaves: list[Tensor], views: Callable[[list[Tensor]], Sequence[Tensor]]) -> None:
        self.leaves, self._views = leaves, views
        self._copies = [leaf.detach().clone() for leaf in leaves]

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._views(self.leaves)
        return q, k, v

    def changed(self) -> bool:
        pairs = zip(self.leaves, self._copies, strict=True)
        return not all(torch.equal(leaf, copy) for leaf, copy in pairs)


def _inputs(case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[_Inputs, Tensor]:
    """Inputs that require gradients, and the gradient of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    num_q, num_k = sum(case.q_lens), sum(case.k_lens)
    q, k, v, grad = (
        torch.randn(rows, case.heads, case.head_dim, generator=generator, dtype=torch.float64)
        for rows in (num_q, num_k, num_k, num_q)
    )
    if case.first_logit is not None:
        q[..., 0] = 1
        k[..., 0] = case.first_logit / _scale(case)
    if case.flat_gradient:
        grad = torch.full((1, 1, 1), 0.7, dtype=torch.float64)
    grad = grad.to(device, dtype).expand(num_q, case.heads, case.head_dim)
    if case.fused:
        fused = torch.stack([q, k, v], 1).to(device, dtype).requires_grad_()
        return _Inputs([fused], lambda leaves: leaves[0].unbind(1)), grad
    return _Inputs([x.to(device, dtype).requires_grad_() for x in (q, k, v)], tuple), grad


def _call(
    kernel: Kernel, inputs: _Inputs, segments: Segments, scale: float | None, grad: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The output, and the gradients of q, k and v."""
    qkv = inputs.qkv()
    output = kernel(*qkv, segments, scale)
    if output.shape != grad.shape or not output.requires_grad:
        return output, None, None, None
    dq, dk, dv = torch.autograd.grad(output, qkv, grad.to(output.dtype), allow_unused=True)
    return output.detach(), dq, dk, dv


def _exact(case: Case, qkv: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients in fp64 on the CPU, by their formulas, and the magnitude of each."""
    q, k, v, do = (x.detach().double().cpu() for x in (*qkv, grad))
    exact = [torch.zeros_like(x) for x in (q, q, k, v)]
    magnitudes = [torch.ones(case.head_dim, dtype=torch.float64)] * 4
    logits, scale = 0.0, _scale(case)
    i = j = 0
    for nq, nk in zip(case.q_lens, case.k_lens, strict=True):
        if nq and nk:
            queries, keys = slice(i, i + nq), slice(j, j + nk)
            q_HQK, k_HSK, v_HSK, do_HQK = (x.transpose(0, 1) for x in (q[queries], k[keys], v[keys], do[queries]))
            s = scale * q_HQK @ k_HSK.mT
            p = torch.softmax(s, dim=2)
            dp = do_HQK @ v_HSK.mT
            delta = (p * dp).sum(2, keepdim=True)
            ds = scale * p * (dp - delta)
            size = scale * p * (do_HQK.abs() @ v_HSK.abs().mT + (p * dp.abs()).sum(2, keepdim=True))
            parts = (p @ v_HSK, ds @ k_HSK, ds.mT @ q_HQK, p.mT @ do_HQK)
            terms = (p @ v_HSK.abs(), size @ k_HSK.abs(), size.mT @ q_HQK.abs(), p.mT @ do_HQK.abs())
            for x, rows, part in zip(exact, (queries, queries, keys, keys), parts, strict=True):
                x[rows] = part.transpose(0, 1)
            magnitudes = [torch.maximum(m, t.amax((0, 1))) for m, t in zip(magnitudes, terms, strict=True)]
            logits = max(logits, float(s.abs().max()))
        i, j = i + nq, j + nk
    return exact, [magnitude * max(1.0, logits / 16) for magnitude in magnitudes]


def _scale(case: Case) -> float:
    return 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale


def _error(one: Tensor | None, exact: Tensor, magnitude: Tensor) -> float:
    if one is None:
        return math.inf
    return float(((one.double().cpu() - exact).abs() / magnitude).max()) if exact.numel() else 0.0
