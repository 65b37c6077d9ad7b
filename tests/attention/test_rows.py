"""Row operations: modulation by sequence by definition, what is kept for backward, precision of summed gradients."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from knapformer.attention import rows
from knapformer.attention.rows import add_gated, mean_by_sequence, modulate
from tests.attention.expanded import AddAsCuda, bytes_kept, expanded_rows


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_modulate_and_add_gated_by_definition():
    x, branch, index = normal(5, 3), normal(5, 3, seed=1), torch.tensor([1, 0, 1, 2, 0])
    shift, scale, gate = normal(3, 3, seed=2), normal(3, 3, seed=3), normal(3, 3, seed=4)
    modulated, added = modulate(x, shift, scale, index), add_gated(x, branch, gate, index)
    for token, row in enumerate(index.tolist()):
        torch.testing.assert_close(modulated[token], x[token] * (1 + scale[row]) + shift[row], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(added[token], x[token] + gate[row] * branch[token], rtol=1e-12, atol=1e-12)
    # Mutation: the rows of another sequence must not pass.
    assert float((modulate(x, shift, scale, (index + 1) % 3) - modulated).abs().max()) > 0.1
    assert float((add_gated(x, branch, gate, (index + 1) % 3) - added).abs().max()) > 0.1


def test_gradients_of_rows_sum_over_their_tokens():
    x, index = normal(5, 3), torch.tensor([1, 0, 1, 1, 0])
    shift, scale = normal(3, 3, seed=2).requires_grad_(), normal(3, 3, seed=3).requires_grad_()
    modulate(x, shift, scale, index).sum().backward()
    assert shift.grad is not None
    assert scale.grad is not None
    assert shift.grad[:, 0].tolist() == [2, 3, 0]
    torch.testing.assert_close(scale.grad[1], x[index == 1].sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1, 2, 5, 100])
def test_blocks_of_rows_change_nothing(monkeypatch, block):
    """Against autograd of the expanded formula; one sequence without tokens, and as many sequences as tokens."""
    monkeypatch.setattr(rows, "BLOCK_ROWS", block)
    for index in (torch.tensor([1, 0, 1, 2, 0]), torch.arange(5), torch.empty(0, dtype=torch.int64)):
        x, branch = (normal(len(index), 3, seed=n).requires_grad_() for n in (0, 1))
        shift, scale, gate = (normal(5, 3, seed=n).requires_grad_() for n in (2, 3, 4))
        expected = x * (1 + scale[index]) + shift[index] + gate[index] * branch
        got = add_gated(modulate(x, shift, scale, index), branch, gate, index)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        grad = normal(len(index), 3, seed=5)
        inputs = x, branch, shift, scale, gate
        for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (got, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_nothing_is_expanded_for_backward():
    x, branch, index = normal(40, 3).requires_grad_(), normal(40, 3, seed=1), torch.arange(40) % 3
    shift, scale, gate = (normal(3, 3, seed=n).requires_grad_() for n in (2, 3, 4))

    def kept(compute):
        storages = {tensor.untyped_storage().data_ptr() for tensor in (x, branch, index)}
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            compute()
        return [len(t) for t in saved if t.untyped_storage().data_ptr() not in storages and len(t) == 40]

    assert not kept(lambda: add_gated(modulate(x, shift, scale, index), branch, gate, index))
    assert kept(lambda: x * (1 + scale[index]) + shift[index])  # the measure notices expansion


def test_gradients_of_rows_add_up_in_full_precision():
    """4,096 ones in bf16 add up to 256."""
    shift = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(4096, 2, dtype=torch.bfloat16)
    modulate(x, shift, shift.detach(), torch.zeros(4096, dtype=torch.int64)).sum().backward()
    assert shift.grad is not None
    assert shift.grad.tolist() == [[4096, 4096]]


def test_without_a_shift():
    x, scale, index = normal(5, 3), normal(2, 3, seed=1).requires_grad_(), torch.tensor([1, 0, 1, 1, 0])
    got, expected = modulate(x, None, scale, index), x * (1 + scale[index])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    grads = (torch.autograd.grad(y.sin().sum(), scale)[0] for y in (got, expected))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("needed", ["x", "shift", "scale"])
def test_only_gradients_that_are_needed(needed):
    """As of a frozen base model under adapters; without a gradient of the scale not even x is kept."""
    inputs = {"x": normal(5, 3), "shift": normal(2, 3, seed=1), "scale": normal(2, 3, seed=2)}
    index = torch.tensor([1, 0, 1, 1, 0])
    inputs[needed].requires_grad_()
    kept, out = bytes_kept(lambda: modulate(inputs["x"], inputs["shift"], inputs["scale"], index))
    out.sin().sum().backward()
    expected = inputs["x"] * (1 + inputs["scale"][index]) + inputs["shift"][index]
    (wanted,) = torch.autograd.grad(expected.sin().sum(), inputs[needed])
    torch.testing.assert_close(inputs[needed].grad, wanted, rtol=1e-12, atol=1e-12)
    few = index.nbytes + inputs["scale"].nbytes
    assert kept == few + (inputs["x"].nbytes if needed == "scale" else 0)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_dtypes_promote_as_in_the_formula(dtypes):
    """Wan keeps residuals in fp32 and projects in bf16."""
    wide, narrow = (getattr(torch, dtype) for dtype in dtypes)
    x, branch, gate = normal(5, 3).to(wide), normal(5, 3, seed=1).to(narrow), normal(2, 3, seed=2).to(wide)
    index = torch.tensor([1, 0, 1, 1, 0])
    leaves = [tensor.requires_grad_() for tensor in (x, branch, gate)]
    got, expected = add_gated(x, branch, gate, index), x + gate[index] * branch
    assert got.dtype == expected.dtype and torch.equal(got, expected)
    grads = torch.autograd.grad(got.sum(), leaves)
    assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]


def long_sums(run):
    """Gradients of rows of two sequences with 16,384 tokens, relative to fp64, added as CUDA adds."""
    index = torch.arange(16_384) // 10_000
    x, grad = normal(len(index), 8).bfloat16(), (normal(len(index), 8, seed=1) + 1).bfloat16()
    vectors = [normal(2, 8, seed=seed).bfloat16() for seed in (2, 3, 4)]

    def gradients(dtype):
        leaves = [rows_SD.to(dtype).requires_grad_() for rows_SD in vectors]
        out = run(x.to(dtype), *leaves, index)
        with AddAsCuda():
            sums = torch.autograd.grad(out, leaves, grad.to(dtype))
        return torch.stack([part.double() for part in sums])

    exact = gradients(torch.float64)
    return float((gradients(torch.bfloat16) - exact).norm() / exact.norm())


def both(x, shift, scale, gate, index):
    return add_gated(x, modulate(x, shift, scale, index), gate, index)


def test_long_sums_in_bf16():
    assert long_sums(both) < 0.01
    with expanded_rows():
        assert long_sums(both) > 0.1


def half_precision_sums(compute):
    """How often the compiled backward adds rows to a half-precision tensor."""
    found = []

    def look(graph, _):
        adds = [node for node in graph.graph.nodes if "index_add" in str(node.target)]
        found.extend(node.meta["val"].dtype for node in adds)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=look)
    index = torch.arange(40) // 30
    x = normal(40, 8).bfloat16()
    vectors = [normal(2, 8, seed=seed).bfloat16().requires_grad_() for seed in (2, 3, 4)]
    torch.compile(compute, backend=backend, fullgraph=True)(x, *vectors, index).sum().backward()
    torch._dynamo.reset()
    assert len(found) == 3
    return sum(dtype == torch.bfloat16 for dtype in found)


# Torch looks at the gradients of all inputs, and warns of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_sums_are_in_fp32():
    def plain(x, shift, scale, gate, index):
        y = x * (1 + scale.index_select(0, index)) + shift.index_select(0, index)
        return x + gate.index_select(0, index) * y

    assert half_precision_sums(both) == 0
    assert half_precision_sums(plain) == 3


def test_means():
    index = torch.tensor([2, 0, 2, 2])
    x = normal(4, 3)
    expected = torch.stack([x[1], torch.zeros(3, dtype=x.dtype), x[[0, 2, 3]].mean(0)])
    torch.testing.assert_close(mean_by_sequence(x, index, 3), expected, rtol=1e-12, atol=1e-12)
    ones = torch.ones(4096, 1, dtype=torch.bfloat16)
    assert mean_by_sequence(ones, torch.zeros(4096, dtype=torch.int64), 1).tolist() == [[1]]
