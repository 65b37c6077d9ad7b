"""Weights from one generator: the same on every rank, on every device, sharded or not.

Torch's layers fill themselves from the global random state while they are built. Ranks that share that state (threads)
or used it differently before would start from different weights, and a large model would be filled twice. So models
are built without storage (`deferred_init`), allocated once and filled by `fill_parameters`.

* Values are drawn in fp32 whatever the model's dtype, so fp64, fp32 and bf16 models of one seed are the same model.
* A parameter that FSDP2 has sharded draws its full value and keeps its own shard: the weights do not depend on the
  number of ranks. One full parameter at a time is in memory, and nothing is communicated.
* No parameter is zero unless asked for. Zero output projections would hide errors: a block that adds 0 * attention
  passes every test with broken attention.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from knapformer.errors import SpecError

DEFAULT_SEED = 0
BIAS_STD = 0.02


@contextmanager
def deferred_init(model: Any) -> Iterator[None]:
    """Build the submodules of `model` in this block on the meta device; allocate and fill them on leaving it.

    They get the device that was current on entry. If that is the meta device, they stay there: call `to_empty` and
    `init_weights`.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        yield
    if device.type != "meta":
        model.to_empty(device=device)
        model.init_weights()


@torch.no_grad()
def fill_parameters(
    model: nn.Module,
    generator: torch.Generator | None = None,
    *,
    zeroed: Collection[nn.Module] = (),
    zero_bias: bool = False,
) -> None:
    """Fill every parameter: normal weights with variance 1 / fan-in, small normal biases, unit norm scales.

    Args:
        model: A model of linear and norm layers with storage, sharded by FSDP2 or not.
        generator: Source of randomness, on any device; a CPU generator seeded with 0 if None. Values depend on its
            state and on the type of device it is on.
        zeroed: Linear layers to set to zero, weight and bias.
        zero_bias: Set all biases to zero.

    Raises:
        SpecError: a parameter is on the meta device, or belongs to a layer type not known here.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(DEFAULT_SEED)
    zeroed_ids = {id(module) for module in zeroed}
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            if param.device.type == "meta":
                raise SpecError(
                    f"parameter {full_name} is on the meta device and has no storage; "
                    "call model.to_empty(device=...) before init_weights"
                )
            if id(module) in zeroed_ids or (zero_bias and name == "bias"):
                param.zero_()
            elif isinstance(module, nn.Linear):
                std = BIAS_STD if name == "bias" else 1 / math.sqrt(module.in_features)
                _copy_normal(param, std, generator)
            elif isinstance(module, nn.RMSNorm):
                param.fill_(1.0)
            else:
                raise SpecError(
                    f"parameter {full_name} belongs to a {type(module).__name__}; "
                    "init knows nn.Linear and nn.RMSNorm only: initialise other layers yourself"
                )


def _copy_normal(param: Tensor, std: float, generator: torch.Generator) -> None:
    """Draw the full parameter on the generator's device; keep all of it, or this rank's shard."""
    full = torch.randn(param.shape, generator=generator, device=generator.device, dtype=torch.float32).mul_(std)
    if isinstance(param, DTensor):
        full = full.to(param.device)
        # src_data_rank=None: every rank cuts its shard from its own copy, so there is no communication.
        full = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
    param.copy_(full)
