"""Data: workloads without pixels (codes, traces, presets) and data sets of pictures and clips (manifests, sampler,
text).

Everything exported here needs NumPy only. What loads pixels needs torch, Pillow and PyAV and is imported by its own
name: `knapformer.data.media`. Reading order: `codes`, `trace`, `workloads`; then `item`, `manifest`, `grid`, `media`,
`sampler`.
"""

from knapformer.data.balanced import AheadPlanner, BalancedSampler
from knapformer.data.codes import DataCode, generate_trace, parse_data_codes
from knapformer.data.demo import build_demo, demo_loader_groups, demo_media_options
from knapformer.data.epoch import EpochSampler
from knapformer.data.grid import Grid, MediaOptions, grid_positions, sample_grid
from knapformer.data.item import Item
from knapformer.data.manifest import Manifest, read_manifest, write_manifest
from knapformer.data.profile import Profile, shipped_profiles
from knapformer.data.sampler import GroupSampler, LoaderGroup, loader_ranks
from knapformer.data.shards import TarShards
from knapformer.data.text import detokenize, pooled_features, tokenize
from knapformer.data.trace import Trace, TraceStep, read_trace, write_trace
from knapformer.data.workloads import cluster_and_cost, load_workload, preset_names

__all__ = [
    "AheadPlanner",
    "BalancedSampler",
    "DataCode",
    "EpochSampler",
    "Grid",
    "GroupSampler",
    "Item",
    "LoaderGroup",
    "Manifest",
    "MediaOptions",
    "Profile",
    "TarShards",
    "Trace",
    "TraceStep",
    "build_demo",
    "cluster_and_cost",
    "demo_loader_groups",
    "demo_media_options",
    "detokenize",
    "generate_trace",
    "grid_positions",
    "load_workload",
    "loader_ranks",
    "parse_data_codes",
    "pooled_features",
    "preset_names",
    "read_manifest",
    "read_trace",
    "sample_grid",
    "shipped_profiles",
    "tokenize",
    "write_manifest",
    "write_trace",
]
