"""`adapt`: give a diffusers transformer a packed forward beside its own, and change nothing else.

The forward of the model and of each of its blocks is replaced, on the instance, by one that looks at its first
argument: `PackedInputs` (for a block, `BlockContext`) goes to the packed forward, anything else to the class's own. No
module, parameter, buffer or name is added, so checkpoints, PEFT and `save_pretrained` see the model they know. Every
block is still entered through its own call, where FSDP2 gathers its weights.
"""

import functools
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from knapformer.errors import SpecError
from knapformer.integrations.diffusers.cogvideox import CogVideoX
from knapformer.integrations.diffusers.family import Family, PackedBlock
from knapformer.integrations.diffusers.flux import Flux
from knapformer.integrations.diffusers.flux2 import Flux2
from knapformer.integrations.diffusers.hunyuan_video import HunyuanVideo
from knapformer.integrations.diffusers.inputs import PackedInputs
from knapformer.integrations.diffusers.ltx_video import LTXVideo
from knapformer.integrations.diffusers.ops import BlockContext
from knapformer.integrations.diffusers.qwen_image import QwenImage
from knapformer.integrations.diffusers.sd3 import StableDiffusion3
from knapformer.integrations.diffusers.wan import Wan
from knapformer.integrations.diffusers.z_image import ZImage

ModelT = TypeVar("ModelT", bound=nn.Module)

_ALL = Flux, Flux2, StableDiffusion3, QwenImage, HunyuanVideo, CogVideoX, Wan, LTXVideo, ZImage

FAMILIES: dict[str, Family] = {family.model_class: family() for family in _ALL}
"""Class name -> family."""


def adapt(model: ModelT) -> ModelT:
    """Let `model(inputs)` take `PackedInputs`, for training; its usual call keeps working. Returns the same model.

    Call it on the bare model, before FSDP2, DDP, compilation or `accelerate` wrap it. Adapters of PEFT may come before
    or after. A model that is loaded anew is adapted anew; adapting twice changes nothing.

    Raises:
        SpecError: for a model that is not known, or has features that the packed forward would not reproduce.
    """
    family = family_of(model)
    if type(model).__name__ not in FAMILIES and bare(model) is not model:
        raise SpecError(f"adapt takes the model itself, got it wrapped in {type(model).__name__}; adapt it first")
    family.check(model)
    _install(model, functools.partial(_run, family))
    for block, packed in family.blocks(model):
        _install(block, packed)
    return model


def family_of(model: Any) -> Family:
    """The family of a model, wrapped or not.

    Raises:
        SpecError: if it is of no known class.
    """
    inner = bare(model)
    for cls in type(inner).__mro__:
        if cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__]
    known = ", ".join(sorted(FAMILIES))
    raise SpecError(f"no packed forward is known for {type(inner).__name__}; known models are {known}")


def bare(model: Any) -> Any:
    """The diffusers model inside DDP, `torch.compile` or PEFT."""
    while not any(cls.__name__ in FAMILIES for cls in type(model).__mro__):
        for name in ("module", "_orig_mod", "base_model", "model"):
            inner = getattr(model, name, None)
            if isinstance(inner, nn.Module) and inner is not model:
                model = inner
                break
        else:
            return model
    return model


def _run(family: Family, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's packed forward, for `PackedInputs` alone."""
    if args or kwargs:
        extra = ", ".join(kwargs) or f"{len(args)} more arguments"
        family.refuse(
            f"{extra} beside PackedInputs; ControlNet, IP-adapter and attention arguments have no packed form"
        )
    return family.forward(model, inputs)


def _install(module: nn.Module, packed: PackedBlock) -> None:
    """Dispatch calls of `module` whose first argument is ours to `packed(module, ...)`."""
    present = module.__dict__.get("forward")
    if present is not None:
        if getattr(present, "knapformer_packed", False):
            return
        raise SpecError(
            f"the forward of a {type(module).__name__} has been replaced before, by hooks of offloading or mixed "
            "precision perhaps; call adapt first"
        )

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], PackedInputs | BlockContext):
            return packed(self, *args, **kwargs)
        # The class may be another by now: FSDP2 derives one of its own.
        return type(self).forward(self, *args, **kwargs)

    forward.knapformer_packed = True  # type: ignore[attr-defined]
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]
