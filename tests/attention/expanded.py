"""What row operations must not do, and plain autograd does: copies for each token, and sums in half precision.

A CPU adds in fp32 where CUDA adds to memory in half precision and rounds each time; `AddAsCuda` adds as CUDA does.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from knapformer.attention import rows


@contextmanager
def expanded_rows():
    """`modulate` and `add_gated` by plain autograd, whoever calls them; gives the bytes of the copies they make."""
    copies = []

    def scale(x, scale_SD, index, added, added_by_sequence):
        per_token = scale_SD.index_select(0, index)
        if not torch.compiler.is_compiling():
            copies.append(per_token.nbytes)
        if added is None:
            return x * per_token
        return x * per_token + (added.index_select(0, index) if added_by_sequence else added)

    with mock.patch.object(rows, "_scale", scale):
        yield copies


class AddAsCuda(TorchDispatchMode):
    """Rows are added one by one to what they are added to, in its precision."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.index_add, torch.ops.aten.index_add_):
            into, axis, index, source = args
            assert axis == 0 and not kwargs
            into = into if func.overloadpacket is torch.ops.aten.index_add_ else into.clone()
            return into.index_put_([index], source, accumulate=True)
        return func(*args, **(kwargs or {}))


def bytes_kept(compute):
    """Bytes that `compute` keeps for backward, each storage counted once."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # holds it, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = compute()
    return sum(storage.nbytes() for storage in storages.values()), out


def check_nothing_is_expanded(compute):
    """Plain autograd keeps one copy more in each call: as many bytes as all the copies together."""
    kept, _ = bytes_kept(compute)
    with expanded_rows() as copies:
        by_autograd, _ = bytes_kept(compute)
    assert copies
    assert by_autograd - kept == pytest.approx(sum(copies), rel=0.08)


def check_sums_are_precise(block, run, num_rows, width, names):
    """Gradients of modulation in bf16, each a sum over thousands of tokens, against fp64. Plain autograd is far off.

    Args:
        block: a module.
        run: (block, x, vec) to rows that a loss may sum.
        num_rows: tokens of the one sequence.
        width: of tokens and of its conditioning vector.
        names: parameters whose gradients are such sums, by their ending.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(num_rows, width, generator=generator).bfloat16() for _ in range(2))
    vec = torch.randn(1, width, generator=generator).bfloat16()
    block.bfloat16()

    def gradients(dtype):
        block.to(dtype)
        block.zero_grad()
        # A mean beside the noise: sums that grow without end are where half precision stops counting.
        out = run(block, x.to(dtype), vec.to(dtype))
        with AddAsCuda():
            (out * (weight.to(dtype) + 1)).sum().backward()
        grads = [p.grad.double().flatten() for name, p in block.named_parameters() if name.endswith(names)]
        assert grads
        return torch.cat(grads)

    def error(got):
        return float((got - exact).norm() / exact.norm())

    exact = gradients(torch.float64)
    assert error(gradients(torch.bfloat16)) < 0.02
    with expanded_rows():
        assert error(gradients(torch.bfloat16)) > 0.1
