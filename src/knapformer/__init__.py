"""knapformer: online load balancing for training diffusion transformers on images and videos of every size.

The names below are the whole public surface of the top level. Planning (`knapformer.plan`, `knapformer.data`)
needs NumPy only; whatever needs torch is imported when it is first asked for, so that planners, the command line
and reports start without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from knapformer import errors
from knapformer.plan import BagSpec, Cluster, CostModel, Limits, Links, Placement, Sequences

if TYPE_CHECKING:
    from knapformer.attention import Layout, attend, cross_attend
    from knapformer.balancer import PackedBatch, RoutingStep, SequenceBalancer

__version__ = "0.1.0"

__all__ = [
    "BagSpec",
    "Cluster",
    "CostModel",
    "Layout",
    "Limits",
    "Links",
    "PackedBatch",
    "Placement",
    "RoutingStep",
    "SequenceBalancer",
    "Sequences",
    "attend",
    "cross_attend",
    "errors",
]

_NEEDS_TORCH = {
    "Layout": "knapformer.attention",
    "attend": "knapformer.attention",
    "cross_attend": "knapformer.attention",
    "PackedBatch": "knapformer.balancer",
    "RoutingStep": "knapformer.balancer",
    "SequenceBalancer": "knapformer.balancer",
}


def __getattr__(name: str) -> Any:
    module = _NEEDS_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module 'knapformer' has no attribute {name!r}")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise errors.BackendUnavailableError(
            f"knapformer.{name} needs torch, which is not installed; install it with: pip install 'knapformer[torch]'"
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
