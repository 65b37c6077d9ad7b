"""DistributedDataParallel in ranks of `tests.ranks`."""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module) -> DistributedDataParallel:
    """The model under DDP. Its logger crashes on the harness's group, which torch wraps to check every collective."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    group = dist.new_group()
    dist.set_debug_level(level)
    return DistributedDataParallel(model, process_group=group)
