"""Workloads by name: one string for a shipped preset, a data-code string, or a trace file.

Presets are recorded lengths (see `presets/README.md`). Those that were made from data codes, `flux-*`, also exist for
other world sizes, longer runs and other seeds: they are then drawn again from their codes.
"""

import difflib
import re
import warnings
from functools import cache
from pathlib import Path

from knapformer.data.codes import generate_trace
from knapformer.data.profile import Profile
from knapformer.data.trace import Trace, read_trace
from knapformer.errors import KnapFormerWarning, SpecError
from knapformer.plan import Cluster, CostModel

_PRESETS = Path(__file__).parent / "presets"
_SUFFIX = ".json.gz"


@cache
def preset_names() -> tuple[str, ...]:
    """Names of the shipped presets. The number at the end is the world size; without it, the largest one is meant."""
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in _PRESETS.glob(f"*{_SUFFIX}")))


def load_workload(text: str, *, world_size: int | None = None, num_steps: int | None = None, seed: int = 0) -> Trace:
    """The trace that `text` names.

    Args:
        text: a preset (`flux-joint-32`, `real-mix-8`, or `flux-joint` for its recorded world size), a data-code string
            (`g8b4i256f1s0,g4b1i512f85s1`), or the path of a `.json` or `.json.gz` trace file.
        world_size: ranks; by default what the preset, code or file has. Other sizes work where the workload is
            described by data codes.
        num_steps: take the first steps of a recorded trace, or draw this many from data codes (by default as many as
            the preset has, else 20).
        seed: for drawing from data codes. A preset made from codes is drawn anew if it is not 0.

    Raises:
        SpecError: if nothing has that name (close matches and all presets are listed), a data code is wrong, or the
            workload does not exist for that world size or number of steps.
        DataError: if a trace file breaks the format.
    """
    if (sizes := _sizes_of(text)) is not None:
        trace = _load_preset(text, sizes, world_size=world_size, num_steps=num_steps, seed=seed)
        if "data_codes" not in trace.meta:
            _warn_seed(text, seed)
        return trace
    if re.match(r"g[0-9]", text) and not _is_file(text):
        return generate_trace(text, world_size=world_size, num_steps=20 if num_steps is None else num_steps, seed=seed)
    if text.endswith((".json", ".json.gz")) or _is_file(text):
        trace = read_trace(text)
        if world_size not in (None, trace.world_size):
            raise SpecError(
                f"trace file {text!r} is for {trace.world_size} ranks but {world_size} were asked for; "
                "use its world size, or a workload made of data codes"
            )
        _warn_seed(text, seed)
        return _first_steps(trace, num_steps)
    raise _unknown(text)


def cluster_and_cost(
    trace: Trace, gamma: float, ranks_per_node: int | None, profile: str | None = None
) -> tuple[Cluster, CostModel]:
    """Nodes and prices a workload is planned with."""
    cluster = Cluster(trace.world_size, trace.meta.get("ranks_per_node") if ranks_per_node is None else ranks_per_node)
    if profile is not None:
        return cluster, Profile.load(profile).cost_model()
    return cluster, CostModel.from_shapes(trace.meta.get("d_model", 3072), trace.meta.get("heads", 24), gamma=gamma)


def _sizes_of(text: str) -> dict[int, str] | None:
    """World size -> shipped preset for the family that `text` names, largest world last; None if it names none."""
    family = re.sub(r"-[0-9]+$", "", text)
    sizes = {int(name.rsplit("-", 1)[1]): name for name in preset_names() if name.rsplit("-", 1)[0] == family}
    return dict(sorted(sizes.items())) or None


def _load_preset(
    text: str, sizes: dict[int, str], *, world_size: int | None, num_steps: int | None, seed: int
) -> Trace:
    named = re.search(r"-([0-9]+)$", text)
    if named and world_size not in (None, int(named[1])):
        raise SpecError(
            f"workload {text!r} is for {named[1]} ranks but {world_size} were asked for; "
            f"leave one of them out, e.g. {text[: named.start()]!r} with that world size"
        )
    world_size = int(named[1]) if named else world_size
    wanted = max(sizes) if world_size is None else world_size
    recorded = _read_preset(sizes.get(wanted, sizes[max(sizes)]))
    codes = recorded.meta.get("data_codes")
    if codes is None:
        if wanted not in sizes:
            raise SpecError(
                f"workload {text!r} does not exist for {wanted} ranks: it is recorded, for {sorted(sizes)} ranks, and "
                "not described by data codes; choose one of these world sizes or a flux-* workload"
            )
        return _first_steps(recorded, num_steps)
    steps = recorded.num_steps if num_steps is None else num_steps
    if wanted == recorded.world_size and seed == 0 and steps <= recorded.num_steps:
        return recorded.head(steps)
    drawn = generate_trace(codes, world_size=wanted, num_steps=steps, seed=seed)
    family = recorded.name.rsplit("-", 1)[0]
    return Trace(f"{family}-{wanted}", wanted, drawn.steps, {**drawn.meta, "preset": family})


@cache
def _read_preset(name: str) -> Trace:
    return read_trace(_PRESETS / f"{name}{_SUFFIX}")


def _warn_seed(text: str, seed: int) -> None:
    if seed != 0:
        warnings.warn(
            f"seed {seed} is ignored: workload {text!r} is recorded, not drawn", KnapFormerWarning, stacklevel=3
        )


def _first_steps(trace: Trace, num_steps: int | None) -> Trace:
    """The first steps of a recorded trace, or all with a warning where it has fewer."""
    if num_steps is None:
        return trace
    if num_steps > trace.num_steps:
        warnings.warn(
            f"trace {trace.name!r} has {trace.num_steps} recorded steps, {num_steps} were asked for; all are taken",
            KnapFormerWarning,
            stacklevel=3,
        )
    return trace.head(min(num_steps, trace.num_steps))


def _unknown(text: str) -> SpecError:
    names = preset_names()
    families = sorted({name.rsplit("-", 1)[0] for name in names})
    close = difflib.get_close_matches(text, [*names, *families], n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return SpecError(
        f"unknown workload {text!r}; {hint}Presets: {', '.join(names)}. Also allowed: a data-code string like "
        "'g8b4i256f1s0,g4b1i512f85s1', or the path of a .json or .json.gz trace file"
    )


def _is_file(text: str) -> bool:
    """Whether a file has this name; a text too long to be a name is none."""
    try:
        return Path(text).is_file()
    except OSError:
        return False
