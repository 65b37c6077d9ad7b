"""Rotary embedding: definition, relative positions, precision, zero rows."""

import pytest
import torch

from knapformer.errors import SpecError
from knapformer.models import rotate, rotation_from_ids

AXES = (4, 6, 2)
HEADS, HEAD_DIM = 3, sum(AXES)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turn(x, ids, theta=100.0):
    return rotate(x, rotation_from_ids(torch.as_tensor(ids), AXES, theta, torch.float64))


def reference(x, ids, theta=100.0):
    """Pairs as complex numbers, one axis after another."""
    numbers = torch.complex(x[..., 0::2].contiguous(), x[..., 1::2].contiguous())
    start = 0
    for axis, dim in enumerate(AXES):
        for j in range(dim // 2):
            angle = ids[:, axis, None].double() * theta ** (-2 * j / dim)
            numbers[..., start + j] *= torch.complex(angle.cos(), angle.sin())
        start += dim // 2
    return torch.view_as_real(numbers).flatten(-2)


def test_equals_complex_multiplication():
    x, ids = normal(5, HEADS, HEAD_DIM), torch.randint(0, 99, (5, 3), generator=torch.Generator().manual_seed(1))
    expected = reference(x, ids)
    torch.testing.assert_close(turn(x, ids), expected, rtol=1e-12, atol=1e-12)
    # Mutation: axes in another order must not pass.
    assert float((turn(x, ids.flip(1)) - expected).abs().max()) > 0.1


def test_scores_depend_on_differences_only():
    q, k = normal(6, HEADS, HEAD_DIM, seed=1), normal(6, HEADS, HEAD_DIM, seed=2)
    ids = torch.randint(0, 20, (6, 3), generator=torch.Generator().manual_seed(3))

    def scores(q_ids, k_ids):
        return torch.einsum("qhd,khd->hqk", turn(q, q_ids), turn(k, k_ids))

    expected = scores(ids, ids)
    moved = ids + torch.tensor([7, -3, 11])
    torch.testing.assert_close(scores(moved, moved), expected, rtol=1e-12, atol=1e-12)
    # Mutation: moving one side only changes the difference.
    assert float((scores(moved, ids) - expected).abs().max()) > 0.1


def test_position_zero_is_not_turned_and_length_is_kept():
    x = normal(4, HEADS, HEAD_DIM)
    ids = torch.tensor([[0, 0, 0], [1, 2, 3], [0, 0, 0], [9, 9, 9]])
    out = turn(x, ids)
    assert torch.equal(out[0::2], x[0::2])
    assert not torch.equal(out[1], x[1])
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)


def test_fractional_positions():
    x = normal(1, HEADS, HEAD_DIM)
    half = [[0.5, 1.5, 0.25]]
    torch.testing.assert_close(turn(turn(x, half), half), turn(x, [[1, 3, 0.5]]), rtol=1e-12, atol=1e-12)


def test_bf16_input_is_turned_in_fp32():
    """Neighbours beyond position 256 stay apart, although bf16 has no number for 257."""
    ids = torch.tensor([[0, 0, 256], [0, 0, 257]])
    rotation = rotation_from_ids(ids, AXES, 1e4, torch.float32)
    x = torch.ones(2, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    out = rotate(x, rotation)
    assert out.dtype == torch.bfloat16
    assert not torch.equal(out[0], out[1])
    rounded = rotation_from_ids(ids.bfloat16(), AXES, 1e4, torch.float32)
    assert torch.equal(rounded.cos_TP[0], rounded.cos_TP[1])


def test_unused_axis():
    rotation = rotation_from_ids(torch.tensor([[5, 1, 2]]), (0, 4, 4), 1e4, torch.float64)
    assert rotation.cos_TP.shape == (1, 4)


def test_zero_rows_keep_the_graph():
    x = torch.empty(0, HEADS, HEAD_DIM, requires_grad=True)
    out = rotate(x, rotation_from_ids(torch.empty(0, 3, dtype=torch.int64), AXES, 1e4, torch.float32))
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 3, 1)])
def test_wrong_ids(shape):
    with pytest.raises(SpecError, match=r"ids has shape .*; expected \(4, 3\)"):
        rotation_from_ids(torch.zeros(shape), AXES, 1e4, torch.float32)
