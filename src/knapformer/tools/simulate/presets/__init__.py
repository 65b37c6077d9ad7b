"""Models, devices and clusters by name, with a source for every number. Data are TOML files beside this module."""

from knapformer.tools.simulate.presets.clusters import (
    ClusterPreset,
    DevicePreset,
    cluster_preset,
    device_names,
    device_preset,
)
from knapformer.tools.simulate.presets.models import ModelShape, model_names, model_preset
from knapformer.tools.simulate.presets.workloads import named_workload, workload_names

__all__ = [
    "ClusterPreset",
    "DevicePreset",
    "ModelShape",
    "cluster_preset",
    "device_names",
    "device_preset",
    "model_names",
    "model_preset",
    "named_workload",
    "workload_names",
]
