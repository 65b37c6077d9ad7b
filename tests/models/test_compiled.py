"""Compiled blocks: two graphs per class whatever a rank holds, and the results of eager blocks."""

import copy
import random

import pytest
import torch
import torch._dynamo
from torch import nn

from knapformer.errors import SpecError
from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig, compile_blocks, compiled
from tests.models.reference import errors, make_samples, run_packed

MODELS = {
    "dit": lambda: DiT(DiTConfig.tiny(axes_dims=(2, 2, 2))),
    "mmdit": lambda: MMDiT(MMDiTConfig.tiny(axes_dims=(2, 2, 2), num_double=1, num_single=1)),
}
BLOCK_CLASSES = {"dit": 1, "mmdit": 2}
NUM_BATCHES = 50


class Counter:
    """A backend that counts the graphs it is given. Backward graphs belong to them and are not counted."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, inputs):
        self.num_graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


# Torch looks at the gradients of all inputs, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def batches(with_text):
    """(text, image) lengths: first the corner cases, in which sizes are 0 and 1, then anything."""
    rng = random.Random(0)
    corners = [[(0, 5)], [], [(0, 1)], [(1, 0)], [(4, 0)], [(1, 1)], [(0, 3), (0, 4)], [(3, 1), (0, 1)], [(0, 1)] * 3]
    others = [[(rng.randint(0, 6), rng.randint(0, 20)) for _ in range(rng.randint(0, 5))] for _ in range(NUM_BATCHES)]
    lengths = [[pair for pair in batch if sum(pair)] for batch in [*corners, *others][:NUM_BATCHES]]
    return lengths if with_text else [[(0, sum(pair)) for pair in batch] for batch in lengths]


@pytest.mark.parametrize("name", MODELS)
def test_two_graphs_per_block_class(name):
    eager, counter = MODELS[name]().double(), Counter()
    model = copy.deepcopy(eager)
    compile_blocks(model, backend=counter)
    for lengths in batches(with_text=name == "mmdit"):
        samples = make_samples(model.config, lengths)
        assert max(errors(run_packed(model, samples), run_packed(eager, samples)).values()) < 1e-12
    assert counter.num_graphs == 2 * BLOCK_CLASSES[name]


def test_without_marks_sizes_of_0_and_1_compile_again(monkeypatch):
    """What the count above guards against."""
    model, counter = MODELS["dit"](), Counter()
    compile_blocks(model, backend=counter)
    monkeypatch.setattr(compiled, "_mark_rows", lambda value: None)
    for lengths in [[(0, 5)], [(0, 3), (0, 4)], [(0, 1)]]:
        run_packed(model, make_samples(model.config, lengths, dtype=torch.float32))
    assert counter.num_graphs > 2


def test_a_copy_uses_its_own_weights():
    """A compiled function bound to the block would take the weights of the original."""
    model = MODELS["dit"]().double()
    compile_blocks(model, backend="eager")
    clone, eager = copy.deepcopy(model), MODELS["dit"]().double()
    with torch.no_grad():
        for parameter in (*clone.parameters(), *eager.parameters()):
            parameter.mul_(1.01)
    samples = make_samples(model.config, [(0, 5), (0, 2)])
    expected = run_packed(eager, samples)
    assert max(errors(run_packed(clone, samples), expected).values()) < 1e-12
    assert max(errors(run_packed(model, samples), expected).values()) > 1e-3


def test_nothing_to_compile_in_error():
    with pytest.raises(SpecError, match=r"Linear has no module with a piece to compile; mark methods .*\.piece"):
        compile_blocks(nn.Linear(2, 2))
