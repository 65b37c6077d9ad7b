"""Calibration of small layers: phases and their attention are timed, FLOP are the formula's, input is checked."""

import json

import pytest
import torch
from torch import nn

from knapformer.attention import Layout
from knapformer.cli.app import run
from knapformer.data import Profile
from knapformer.data.profile import PHASES
from knapformer.errors import BackendUnavailableError, CalibrationError, SpecError
from knapformer.report import read_records
from knapformer.tools.calibrate.flops import count_flops
from knapformer.tools.calibrate.layers import make_layers
from knapformer.tools.calibrate.packs import choose_packs
from knapformer.tools.calibrate.run import Budget, calibrate
from knapformer.tools.calibrate.timing import TimedLayout, time_pack
from knapformer.train.clock import Clock


class OwnBlock(nn.Module):
    """A user's module of the protocol: two layers that attend, of 6 heads and an odd width."""

    width, num_heads, num_layers, mlp_ratio = 30, 6, 2, 2.0

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(30, 90), nn.Linear(30, 30)

    def forward(self, x, layout):
        for _ in range(2):
            q, k, v = self.qkv(x).unflatten(1, (3, 6, 5)).unbind(1)
            x = x + self.out(layout.attend(q, k, v).flatten(1))
        return x


class NoHeads(OwnBlock):
    num_heads = None


OWN = f"{__name__}:OwnBlock"


@pytest.fixture(autouse=True)
def one_thread():
    """As in a calibration, and several threads are slow where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("block", ["dit", "mmdit", OWN])
def test_every_phase_and_its_attention_is_timed(block):
    layers = make_layers(block, d_model=42, num_heads=7, mlp_ratio=2.0)
    layout = layers.layout((33, 8, 8, 1), None)
    layer, attention = time_pack(layers, layout, Clock(torch.device("cpu")))
    assert list(layer) == list(attention) == list(PHASES)
    assert all(0 < attention[phase] < layer[phase] for phase in PHASES)


def test_a_timed_layout_changes_nothing():
    layers = make_layers("mmdit", d_model=32, num_heads=2, dtype=torch.float64)
    layout = layers.layout((9, 4), None)
    inputs = layers.inputs(layout)
    timed = TimedLayout(layout, Clock(torch.device("cpu")))
    outputs = [layers.run(one, *inputs) for one in (layout, timed)]
    assert torch.equal(*outputs)
    gradients = [torch.autograd.grad(o.square().sum(), layers.leaves(inputs)) for o in outputs]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert {name: len(marks) for name, marks in timed.marks.items()} == dict.fromkeys(timed.marks, 3)
    assert all(a < b for a, b in zip(timed.marks["grad_start"], timed.marks["grad_stop"], strict=True))


@pytest.mark.parametrize(("ratio", "coeff"), [(4.0, 24), (2.0, 16)])
@pytest.mark.parametrize("block", ["dit", "mmdit"])
def test_counted_flops_are_the_formula(block, ratio, coeff):
    """8 + 4 r a token over d^2, and 4 head_dim a row and key; backward twice that; six modulations a sequence."""
    flops = count_flops(make_layers(block, d_model=56, num_heads=7, mlp_ratio=ratio))
    for phase, times in zip(PHASES, (1, 1, 2), strict=True):
        assert flops[phase].token == pytest.approx(times * coeff * 56**2)
        assert flops[phase].per_qk_pair == pytest.approx(times * 4 * 8)
        assert flops[phase].sequence == pytest.approx(times * 2 * 6 * 56**2)


def test_counted_flops_of_an_own_module_are_per_layer():
    flops = count_flops(make_layers(OWN))
    assert flops["forward"].token == pytest.approx(8 * 30**2)
    assert (flops["backward"].per_qk_pair, flops["forward"].sequence) == (pytest.approx(40), pytest.approx(0))


def test_a_calibration_gives_a_profile():
    shares = []
    profile = calibrate(
        make_layers("dit", d_model=48, num_heads=3),
        lengths=(16, 256),
        budget=Budget(seconds=1e-3, min_rounds=1),
        name="small",
        progress=shares.append,
    )
    assert profile == Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert (profile.kernel, profile.shape.head_dim, profile.shape.dtype) == ("sdpa_loop", 16, "float32")
    assert profile.seconds([256]) > profile.seconds([16]) > 0
    assert {s.held_out for s in profile.samples} == {False, True}
    for sample in profile.samples:
        assert sample.runs == 1
        for timing in (*sample.layer.values(), *sample.attention.values()):
            assert timing.low <= timing.seconds <= timing.high
    assert shares == [pytest.approx(0, abs=0.5)]


def test_packs():
    packs = choose_packs(64, 4096)
    fitted, held_out = ({n for p in packs if p.held_out == kept for n in p.lengths} for kept in (False, True))
    alone = {p.lengths[0] for p in packs if len(p.lengths) == 1}
    assert {64, 128, 256, 512, 1024, 2048, 4096} == fitted and fitted | held_out == alone
    assert alone - fitted == {91, 181, 362, 724, 1448, 2896}
    assert all(p.held_out for p in packs if set(p.lengths) - fitted)  # no held-out length is fitted
    assert choose_packs(64, 4096) == packs
    with pytest.raises(CalibrationError, match="lengths 64 to 100 at 7 points"):
        choose_packs(64, 100)


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        ("unet", SpecError, "block 'unet' is not known; use dit, mmdit, or the import path"),
        ("nowhere.blocks:Block", CalibrationError, "cannot import 'nowhere.blocks': No module named 'nowhere'"),
        (f"{__name__}:Missing", CalibrationError, "has nothing called 'Missing'"),
        (f"{__name__}:NoHeads", CalibrationError, "num_heads is None; it must be a torch module"),
        ("torch.nn:Identity", CalibrationError, "width is None, num_heads is None"),
        ("torch.nn:Linear", CalibrationError, "can be called without arguments"),
    ],
)
def test_what_cannot_be_measured_is_named(block, error, message):
    with pytest.raises(error, match=message):
        make_layers(block)


def test_the_kernel_is_the_one_asked_for():
    layers = make_layers("dit", d_model=32, num_heads=2)
    with pytest.raises(BackendUnavailableError, match="varlen"):
        calibrate(layers, kernel="varlen")
    assert isinstance(layers.layout((3,), None), Layout)


def test_the_command_prints_one_object_and_writes_its_files(tmp_path, capsys):
    out = tmp_path / "p.json"
    arguments = ["--block", "dit", "--width", "48", "--heads", "3", "--shortest", "16", "--longest", "128"]
    assert run(["calibrate", "--device", "cpu", *arguments, "--seconds", "0.1", "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    profile = Profile.load(out)
    assert result["recommended"] == profile.recommended and result["gamma"] == profile.gamma
    assert result["fits"]["terms"]["held_out_mean"] == profile.fits["terms"].mean_error
    record = read_records(result["record"])["cpu"]
    assert len(record.steps) == len(profile.samples)
    assert record.steps[0]["modelled_terms"] == pytest.approx(profile.seconds(record.steps[0]["lengths"], fit="terms"))
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == 1 and f"{profile.fits['table'].worst_error:.2%}" in page
    assert run(["plan", "flux-lowres-32", "--steps", "1", "--profile", str(out), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["after"]["time_imbalance"]["mean"] < planned["before"]["time_imbalance"]["mean"]
    assert run(["plan", "flux-lowres-32", "--steps", "1", "--profile", "missing.json"]) == 2
    assert "cannot read the profile 'missing.json'" in capsys.readouterr().err


def test_bad_options_are_refused(capsys):
    assert run(["calibrate", "--device", "cpu", "--threads", "0"]) == 2
    assert "threads is 0" in capsys.readouterr().err
    assert run(["calibrate", "--device", "cpu", "--width", "30", "--heads", "4"]) == 2
    assert "30 is not a multiple of num_heads 4" in capsys.readouterr().err
