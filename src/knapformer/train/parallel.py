"""FSDP2 wiring: shard every block and the rest, checkpoint activations, pick the precision the device has.

Ranks hold different numbers of tokens, some none. So every rank runs every module (on zero rows if need be).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from knapformer.attention import keep_attention
from knapformer.errors import SpecError
from knapformer.models import PackedModel, compile_blocks

Precision = Literal["auto", "float32", "bfloat16"]
Checkpointing = bool | Literal["keep-attention"]


def make_mesh(device_type: str, replicas: int = 1) -> DeviceMesh:
    """All ranks: one sharding group, or `replicas` of them side by side (HSDP)."""
    world = dist.get_world_size()
    if replicas < 1 or world % replicas:
        raise SpecError(f"replicas is {replicas}; it must divide the world size {world}")
    if replicas == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def shard_model(
    build: Callable[[], PackedModel],
    mesh: DeviceMesh,
    *,
    seed: int = 0,
    checkpointing: Checkpointing = False,
    compile: bool | str = False,
    precision: Precision = "auto",
    dtype: torch.dtype = torch.float32,
) -> PackedModel:
    """Build a model without storage, shard it over `mesh`, allocate and fill it: the same weights on any mesh.

    Args:
        build: makes the model.
        mesh: from `make_mesh`.
        seed: of the weights.
        checkpointing: recompute each block's activations in backward, all, or all but attention (`keep_attention`).
        compile: whether blocks are compiled (`compile_blocks`), or the backend to do it with.
        precision: of the computation; "auto" is bf16 on CUDA and fp32 elsewhere. Gradients are reduced in fp32.
        dtype: of the parameters.
    """
    with torch.device("meta"):
        model = build().to(dtype)
    if compile:
        compile_blocks(model, backend="inductor" if compile is True else compile)
    blocks = model.blocks()
    if checkpointing:
        ids = {id(block) for block in blocks}
        kept = {"context_fn": keep_attention} if checkpointing == "keep-attention" else {}
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, **kept),
            check_fn=lambda module: id(module) in ids,
        )
    half = precision == "bfloat16" or (precision == "auto" and mesh.device_type == "cuda")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for block in model.blocks():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The root takes times and positions as they are: rounded to bf16 they would be other times and positions.
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, cast_forward_inputs=False))
    model.to_empty(device=mesh.device_type)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model
