"""The demo's run: its shape is the one that the shipped prices were measured for, its data that of the demo."""

from pathlib import Path

from knapformer.data import Profile, demo_loader_groups, demo_media_options
from knapformer.train.demo import PROFILE, demo_config


def test_the_run_fits_its_prices_and_its_data() -> None:
    config = demo_config(Path("d/manifest.jsonl"), 7)
    measured, shape = Profile.load(PROFILE).shape, config.shape()
    assert (shape.width, shape.num_heads, shape.mlp_ratio) == (measured.d_model, measured.num_heads, measured.mlp_ratio)
    assert (config.media_options(), config.loader_groups()) == (demo_media_options(), demo_loader_groups())
    assert (config.data.manifest, config.train.steps, config.balancer.planner) == ("d/manifest.jsonl", 7, "local")
