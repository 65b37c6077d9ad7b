"""The demo's training run: a small MMDiT, a clip on one loader, a few small images on the other."""

from pathlib import Path

from knapformer.data import demo_loader_groups, demo_media_options
from knapformer.train.config import BalancerConfig, DataConfig, LoaderConfig, ModelConfig, RunConfig, TrainConfig

PROFILE = "demo-cpu"
"""Measured prices of the demo's layers; ships with the library."""


def demo_config(manifest: Path, steps: int) -> TrainConfig:
    """The unbalanced run of `knapformer demo`.

    Args:
        manifest: that `knapformer.data.build_demo` wrote.
        steps: to take.
    """
    media = demo_media_options()
    loaders = [LoaderConfig(source=g.source, num_loaders=g.num_loaders, batch=g.batch) for g in demo_loader_groups()]
    data = DataConfig(
        manifest=str(manifest),
        loaders=loaders,
        patch=media.patch,
        max_pixels=media.max_pixels,
        fps=media.fps,
        max_frames=media.max_frames,
    )
    model = ModelConfig(width=192, num_heads=4, num_double=2, num_single=4, axes_dims=(16, 16, 16))
    balancer = BalancerConfig(planner="local", profile=PROFILE)
    return TrainConfig(data=data, model=model, balancer=balancer, train=RunConfig(steps=steps))
