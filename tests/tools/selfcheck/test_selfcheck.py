"""The self-check passes for models that are right, and says what differs for those that are not."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from examples.packed_batch import Block, TinyDiT
from torch.nn import functional as F

from knapformer.cli.app import run
from knapformer.errors import SpecError
from knapformer.tools.selfcheck.models import diffusers_batch, load_model
from knapformer.tools.selfcheck.selfcheck import selfcheck
from tests.ranks import run_ranks

EXAMPLE = str(Path(__file__).resolve().parents[3] / "examples" / "packed_batch.py")


class PastTheLayout(Block):
    """Attention of all tokens of the rank to all: right on one sequence, wrong on several."""

    def forward(self, x, time, layout):
        qkv = self.qkv(x).view(len(x), 3, self.heads, self.head_dim).unbind(1)
        q, k, v = (y.transpose(0, 1) for y in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(0, 1) + 0 * layout.attend(*qkv)
        return super().forward(x + self.out(mixed.flatten(1)), time, layout)


class DropoutByRank(Block):
    """A mask from each rank's own generator."""

    def forward(self, x, time, layout):
        return super().forward(F.dropout(x, 0.5), time, layout)


class ShiftByRank(Block):
    """The same every time, but another on every rank."""

    def forward(self, x, time, layout):
        return super().forward(x, time + dist.get_rank(), layout)


class TimeByPlace(Block):
    """Takes the first sequence's time for all."""

    def forward(self, x, time, layout):
        return super().forward(x, time[:1].expand_as(time), layout)


WRONG = {cls.__name__: cls for cls in (PastTheLayout, DropoutByRank, ShiftByRank, TimeByPlace)}


def check(rank, world_size, name, dtype=torch.float32):
    torch.manual_seed(rank)  # weights come from rank 0
    if name in WRONG:
        model = TinyDiT()
        model.blocks[1] = WRONG[name](64, 4)
    elif name == "TinyDiT":
        model = TinyDiT()
    else:
        model = load_model(name)
    return selfcheck(model.to(dtype), torch.device("cpu"), length=60)


@pytest.mark.parametrize("name", ["mmdit", "cross", "TinyDiT"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_right_models_pass(world_size, name):
    for report in run_ranks(world_size, check, name):
        assert report.passed and report.deterministic and report.differs == ()
        assert [worst.plan for worst in report.worst] == ["balanced", "one bag"][: 1 + (world_size > 1)]
        assert 0 <= max(worst.error for worst in report.worst) < 2e-5
        assert (report.ranks, report.dtype, report.backend) == (world_size, "float32", "gloo")
    if world_size == 3:
        assert report.split["one bag"] == "5 of 5" and report.split["balanced"][0] != "0"


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float64, 1e-12), (torch.bfloat16, 5e-2)])
def test_dtypes(dtype, largest):
    for report in run_ranks(2, check, "mmdit", dtype):
        assert report.passed and str(dtype).endswith(report.dtype)
        assert max(worst.error for worst in report.worst) < largest


@pytest.mark.parametrize("name", ["PastTheLayout", "ShiftByRank", "TimeByPlace"])
def test_wrong_models_are_reported(name):
    for report in run_ranks(2, check, name):
        assert not report.passed and report.deterministic
        assert {one.plan for one in report.differs} == {"balanced", "one bag"}
        assert "output" in {one.tensor for one in report.differs}
        assert any(one.tensor.startswith("gradient of blocks.") for one in report.differs)
        assert report.differs[0].error == max(one.error for one in report.differs) > 100 * report.tolerance


def test_randomness_is_told_apart():
    for report in run_ranks(2, check, "DropoutByRank"):
        assert not report.passed and not report.deterministic
        assert {one.plan for one in report.differs} == {"unbalanced again"}


def test_a_model_of_diffusers(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=12,
        num_attention_heads=3,
        joint_attention_dim=10,
        pooled_projection_dim=6,
        axes_dims_rope=(4, 4, 4),
        guidance_embeds=True,
    )
    model.save_config(tmp_path)
    for report in run_ranks(2, check, str(tmp_path), timeout=120.0):
        assert report.passed, report.differs
        assert report.model == "FluxTransformer2DModel"


def test_the_command(capfd):
    assert run(["selfcheck", "--model", f"{EXAMPLE}:TinyDiT", "--ranks", "2", "--length", "40", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["passed"] and [one["ranks"] for one in found["checks"]] == [2]


def test_models_that_cannot_be_found_are_named(tmp_path, capsys):
    for name, message in {
        "nothing": "no model 'nothing'",
        "no.such.module:x": "cannot import",
        f"{EXAMPLE}:Missing": "nothing called 'Missing'",
        f"{tmp_path / 'x.py'}:f": "there is no file",
        str(tmp_path): "cannot read",
        "builtins:dict": "made a dict",
    }.items():
        with pytest.raises(SpecError, match=message):
            load_model(name)
    assert run(["selfcheck", "--model", "nothing"]) == 2
    with pytest.raises(SpecError, match="Linear has no method example"):
        diffusers_batch(torch.nn.Linear(2, 2), [3], [torch.Generator()])
    with pytest.raises(SpecError, match="no parameters"):
        selfcheck(torch.nn.Identity(), torch.device("cpu"))
