"""Devices and clusters by name. Numbers and sources: `devices.toml`.

A cluster is `DEVICExRANKS` and options joined by '-':

    h100x32                 4 nodes of 8 H100 with NVLink, one 400 Gb/s adapter per GPU
    a100x64-pcie-nic100     no NVLink, 100 Gb/s per GPU
    h100x32-inter50         50 GB/s achieved between nodes, per GPU and direction
    b200x16-node4-shard8    nodes of 4; parameters sharded over 8 ranks and replicated

`nicN` is a line rate [Gb/s per GPU], of which 80 % are achieved, as of PCIe; NVLink achieves two thirds. `intraN` and
`interN` give what is achieved [GB/s per GPU and direction] and override the others.
"""

import re
from dataclasses import dataclass
from functools import cache

from knapformer.errors import SpecError
from knapformer.plan import Cluster, Links
from knapformer.tools.simulate.presets.shipped import find_preset, read_presets

NVLINK_EFFICIENCY = 2 / 3
NIC_EFFICIENCY = 0.8

_NAME = re.compile(r"([a-z][a-z0-9]*)x([0-9]+)")
_OPTION = re.compile(r"(nic|intra|inter|node|shard)([0-9]+(?:\.[0-9]+)?)|(pcie)")


@dataclass(frozen=True, slots=True)
class DevicePreset:
    """An accelerator.

    Attributes:
        name, title: its key, its name in words.
        peak_flops: dense bf16 peak [FLOP/s]; what utilisations are given of.
        memory_bytes: device memory [byte].
        memory_bandwidth: of that memory [byte/s].
        nvlink, pcie: link to the other devices of a node, one direction, nominal [byte/s].
        nic_gbits: usual network adapter per device [Gb/s].
        token_flops, attention_flops: rates assumed to be sustained in training [FLOP/s].
        source, sustained: where the numbers are from; what the sustained rates rest on.
        unsure: which numbers are estimates; empty for none.
    """

    name: str
    title: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    nvlink: float
    pcie: float
    nic_gbits: float
    token_flops: float
    attention_flops: float
    source: str
    sustained: str
    unsure: str = ""


@dataclass(frozen=True, slots=True)
class ClusterPreset:
    """A cluster.

    Attributes:
        name: the text it was read from.
        device: its accelerators.
        world_size: number of ranks, one per device.
        ranks_per_node: ranks of a node; the last may have fewer.
        intra_node, inter_node: achieved bandwidth of a rank's links, one direction [byte/s].
        shard_size: ranks that parameters are sharded over, others hold replicas (HSDP); None for all.
    """

    name: str
    device: DevicePreset
    world_size: int
    ranks_per_node: int
    intra_node: float
    inter_node: float
    shard_size: int | None = None

    def cluster(self) -> Cluster:
        """What planners see."""
        return Cluster(self.world_size, self.ranks_per_node, Links(self.intra_node, self.inter_node))


@cache
def _table() -> dict[str, DevicePreset]:
    return read_presets("devices.toml", DevicePreset)


def device_names() -> tuple[str, ...]:
    """Names of all device presets."""
    return tuple(_table())


def device_preset(name: str) -> DevicePreset:
    """A device by name. Raises `SpecError` that lists the names."""
    return find_preset(_table(), name, "device")


def cluster_preset(text: str) -> ClusterPreset:
    """Read a cluster such as `h100x32-nic200`. Raises `SpecError` naming what it cannot read."""
    name, *options = text.split("-")
    match = _NAME.fullmatch(name)
    if match is None or int(match[2]) < 1:
        raise SpecError(
            f"cluster {text!r}: cannot read {name!r}; expected a device and a number of ranks such as 'h100x32'"
        )
    device, world_size = device_preset(match[1]), int(match[2])
    given: dict[str, float] = {}
    for option in options:
        found = _OPTION.fullmatch(option)
        key = found and (found[1] or found[3])
        if not key or key in given or (found[1] and float(found[2]) <= 0):  # type: ignore[index]
            raise SpecError(
                f"cluster {text!r}: cannot read {option!r}; allowed once each are nicN [Gb/s], intraN and interN "
                "[GB/s achieved], nodeN [ranks], shardN [ranks], all above 0, and pcie"
            )
        given[key] = float(found[2]) if found and found[2] else 0.0
    for key in ("node", "shard"):
        if given.get(key, 1) % 1:
            raise SpecError(f"cluster {text!r}: {key}{given[key]:g} must be a whole number of ranks")
    intra = device.pcie * NIC_EFFICIENCY if "pcie" in given else device.nvlink * NVLINK_EFFICIENCY
    inter = given.get("nic", device.nic_gbits) / 8 * 1e9 * NIC_EFFICIENCY
    shard = int(given["shard"]) if "shard" in given else None
    if shard is not None and world_size % shard:
        raise SpecError(f"cluster {text!r}: shard{shard} must divide the {world_size} ranks")
    return ClusterPreset(
        name=text,
        device=device,
        world_size=world_size,
        ranks_per_node=int(given.get("node", 8)),
        intra_node=given["intra"] * 1e9 if "intra" in given else intra,
        inter_node=given["inter"] * 1e9 if "inter" in given else inter,
        shard_size=shard,
    )
