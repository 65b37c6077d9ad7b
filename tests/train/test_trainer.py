"""Training on real files: the same losses on any number of ranks and with any planner, also after a restart."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from knapformer.data import read_manifest
from knapformer.errors import DataError, RankMismatchError, SpecError
from knapformer.train import TrainConfig, Trainer, read_config
from knapformer.train.checkpoint import latest_checkpoint, load_checkpoint
from knapformer.train.config import BalancerConfig, DataConfig, LoaderConfig, ModelConfig, RunConfig
from knapformer.train.flow import draw_noise
from knapformer.train.meters import Recalibration
from tests.ranks import run_ranks

SIZES = [(64, 64), (128, 32), (16, 16), (96, 80), (32, 112), (48, 16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of many sizes; `big` is another source."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(SIZES):
        name = root / ("big" if width * height > 5000 else "small") / f"{i}.png"
        name.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(name)
        name.with_suffix(".txt").write_text("a caption " * i)
    lines = []
    for source in ("big", "small"):
        for path in sorted((root / source).glob("*.png")):
            caption = path.with_suffix(".txt").read_text().strip()
            lines.append({"path": f"{source}/{path.name}", "caption": caption, "source": source})
    (root / "manifest.jsonl").write_text("".join(msgspec.json.encode(line).decode() + "\n" for line in lines))
    return root


def config(folder, **kwargs):
    run = {"steps": 3, "loss": "token", **kwargs.pop("run", {})}
    balancer = {"planner": "local", **kwargs.pop("balancer", {})}
    loaders = [LoaderConfig(source="big"), LoaderConfig(source="small", num_loaders=2, batch=2)]
    return TrainConfig(
        data=DataConfig(manifest=str(folder / "manifest.jsonl"), loaders=loaders, max_text=40),
        model=ModelConfig(
            kind=kwargs.pop("kind", "mmdit"),
            width=32,
            num_heads=2,
            num_double=1,
            num_single=1,
            depth=2,
            axes_dims=(4, 6, 6),
        ),
        balancer=BalancerConfig(**balancer),
        train=RunConfig(**run),
    )


def losses(rank, world_size, settings):
    trainer = Trainer(settings, read_manifest(settings.data.manifest), torch.device("cpu"))
    return [report.loss for _, report in trainer.fit()]


@pytest.mark.parametrize("mode", ["token", "sample"])
def test_losses_do_not_depend_on_ranks_or_planner(folder, mode):
    expected = run_ranks(1, losses, config(folder, run={"loss": mode}))[0]
    assert len(set(expected)) == 3
    for world, balancer in (
        (2, {"planner": "bags", "topology": "g2n1"}),
        (3, {"planner": "local"}),
        (5, {"planner": "balanced"}),
    ):
        got = run_ranks(world, losses, config(folder, run={"loss": mode, "checkpointing": True}, balancer=balancer))
        assert all(one == got[0] for one in got)
        assert got[0] == pytest.approx(expected, rel=1e-5)


def test_the_loss_modes_differ(folder):
    by_token, by_sample = (run_ranks(1, losses, config(folder, run={"loss": m}))[0] for m in ("token", "sample"))
    assert abs(by_token[0] - by_sample[0]) > 1e-4


def test_a_cross_attention_model(folder):
    """The same losses when balanced; and others with other text, which therefore reaches the tokens."""
    run = {"steps": 2, "checkpointing": True}
    expected = run_ranks(1, losses, config(folder, kind="cross", run=run))[0]
    got = run_ranks(3, losses, config(folder, kind="cross", run=run, balancer={"planner": "bags", "topology": "g3n1"}))
    assert got == [got[0]] * 3 and got[0] == pytest.approx(expected, rel=1e-5)
    settings = config(folder, kind="cross", run=run)
    shorter = msgspec.structs.replace(settings, data=msgspec.structs.replace(settings.data, max_text=3))
    assert run_ranks(1, losses, shorter)[0] != pytest.approx(expected, rel=1e-5)


def test_balancing_groups_side_by_side_share_one_loss(folder):
    """Two groups of two ranks: each is balanced on its own, the loss is still that of the whole batch."""
    expected = run_ranks(1, losses, config(folder))[0]
    got = run_ranks(4, losses, config(folder, balancer={"planner": "bags", "topology": "g2n1"}))
    assert got[0] == pytest.approx(expected, rel=1e-5)


def test_restart_on_other_world_sizes(folder, tmp_path):
    settings = config(folder, run={"steps": 4})
    expected = run_ranks(2, losses, settings)[0]
    saved = str(tmp_path / "run")
    first = config(folder, run={"steps": 2, "checkpoints": saved})
    begun = run_ranks(4, losses, first)[0]
    assert begun == pytest.approx(expected[:2], rel=1e-5)
    folders = sorted(Path(saved).iterdir())
    assert [f.name for f in folders] == ["step-00000002"]
    for world in (1, 3):
        target = tmp_path / f"copy-{world}"
        target.mkdir()
        (target / folders[0].name).symlink_to(folders[0])
        resumed = config(folder, run={"steps": 4, "checkpoints": str(target)})
        assert run_ranks(world, losses, resumed)[0] == pytest.approx(expected[2:], rel=1e-4)


def stopped_after_two_steps(rank, world_size, settings):
    """The run is left in the middle: the next batch is loaded and planned, and counts for nothing."""
    trainer = Trainer(settings, read_manifest(settings.data.manifest), torch.device("cpu"))
    loaded = []
    load = trainer.load
    trainer.load = lambda step: loaded.append(step) or load(step)
    waits = []
    for step, report in trainer.fit():
        waits.append(0 <= report.wait_seconds < report.seconds and report.plan_seconds > 0)
        if step == 1:
            break
    return trainer.sampler.step, trainer.sampler.state_dict()["step"], loaded[:2], len(loaded) <= 5, waits


@pytest.mark.parametrize("taken", [1, 2])
def test_a_checkpoint_counts_the_batches_taken_not_those_loaded_ahead(folder, tmp_path, taken):
    """Saved in the middle of a run, after every step; resumed from one of them on other world sizes."""
    expected = run_ranks(2, losses, config(folder, run={"steps": 4}))[0]
    saved = tmp_path / "run"
    settings = config(folder, run={"steps": 8, "checkpoints": str(saved), "save_every": 1})
    assert run_ranks(2, stopped_after_two_steps, settings) == [(2, 2, [0, 1], True, [True, True])] * 2
    assert sorted(f.name for f in saved.iterdir()) == ["step-00000001", "step-00000002"]
    for world in (1, 3):
        target = tmp_path / f"copy-{world}"
        target.mkdir()
        (target / f"step-0000000{taken}").symlink_to(saved / f"step-0000000{taken}")
        got = run_ranks(world, losses, config(folder, run={"steps": 4, "checkpoints": str(target)}))[0]
        assert got == pytest.approx(expected[taken:], rel=1e-4)
        assert len(got) > 1 and got[1:] != pytest.approx(expected[taken:-1], rel=1e-3)  # another step's would differ


def with_a_lost_file(rank, world_size, settings):
    trainer = Trainer(settings, read_manifest(settings.data.manifest), torch.device("cpu"))
    load = trainer.load

    def lose(step):
        if step == 2 and rank == 1:
            raise FileNotFoundError("picture.png")
        return load(step)

    trainer.load = lose
    steps = []
    with pytest.raises((FileNotFoundError, RankMismatchError)) as caught:
        for step, _ in trainer.fit():
            steps.append(step)
    return steps, type(caught.value).__name__, str(caught.value)


def test_a_file_that_cannot_be_loaded_ends_the_run_on_every_rank(folder):
    results = run_ranks(3, with_a_lost_file, config(folder, run={"steps": 4}))
    assert [kind for _, kind, _ in results] == ["RankMismatchError", "FileNotFoundError", "RankMismatchError"]
    assert all(steps == [0, 1] and "picture.png" in text for steps, _, text in results)
    assert "failed at batch 2: FileNotFoundError" in results[0][2]


def test_an_incomplete_checkpoint_is_not_used(tmp_path):
    (tmp_path / "step-00000007").mkdir()
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(DataError, match="not a complete checkpoint"):
        load_checkpoint(tmp_path / "step-00000007", torch.nn.Linear(1, 1), None)


def test_noise_depends_on_seed_step_and_sample_only():
    keys = [{"seed": s, "step": t, "sample": i} for s in (0, 1) for t in (0, 1) for i in (0, 1)]
    draws = [draw_noise((4, 3), **key) for key in keys]
    assert all(torch.equal(draw_noise((4, 3), **key)[0], draw[0]) for key, draw in zip(keys, draws, strict=True))
    assert len({tuple(noise.flatten().tolist()) for noise, _ in draws}) == len({time for _, time in draws}) == len(keys)
    noise, _ = draw_noise((20_000,), seed=3, step=1, sample=2)
    assert abs(float(noise.mean())) < 0.03 and abs(float(noise.std()) - 1) < 0.03


def test_configuration_errors_name_file_and_key(tmp_path):
    path = tmp_path / "run.toml"
    cases = {
        "[model]\nwidth = 'wide'": r"run.toml: .*`\$.model.width`",
        "[model]\nwidht = 3": r"run.toml: .*unknown field `widht`",
        "[model": r"run.toml is not TOML: ",
        "[train]\nsteps = 3": r"\[data\] needs 'manifest'",
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(SpecError, match=message):
            read_config(path)
    with pytest.raises(SpecError, match=r"cannot read .*missing.toml.: No such file"):
        read_config(tmp_path / "missing.toml")
    path.write_text('[data]\nmanifest = "photos"\n[[data.loaders]]\nsource = "a"\n')
    assert read_config(path).data.manifest == str(tmp_path / "photos")


def recalibrated(rank, world_size, settings):
    """Every rank estimates something else; what each rank plans for, and its losses."""
    trainer = Trainer(settings, read_manifest(settings.data.manifest), torch.device("cpu"))
    asked = []

    def estimate(cost):
        asked.append(trainer.sampler.step)
        return Recalibration(speeds=(1000, 300 + rank), straggler=None, pair_over_token=None, steps=9)

    trainer._meter.estimate = estimate
    losses, tokens = [], []
    for _, report in trainer.fit():
        losses.append(report.loss)
        tokens.append(trainer.balancer.latest.placement.tokens().tolist())
    return losses, asked, trainer.balancer.cluster.speeds, tokens


def test_recalibration_gives_every_rank_the_same_speeds_and_changes_no_loss(folder):
    expected = run_ranks(2, losses, config(folder, run={"steps": 5}))[0]
    settings = config(folder, run={"steps": 5}, balancer={"planner": "balanced", "recalibrate": 2})
    results = run_ranks(2, recalibrated, settings)
    assert results[0] == results[1]
    got, asked, speeds, tokens = results[0]
    assert got == pytest.approx(expected, rel=1e-5)
    assert asked == [2, 4, 5] and speeds == (1000, 300)
    shares = [second / (first + second) for first, second in tokens]
    assert min(shares[:2]) > 0.4 > max(shares[2:])  # the second rank gets less once it is known to be slow
