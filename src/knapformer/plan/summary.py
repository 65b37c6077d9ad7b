"""The paper's routing-plan summary: a placement as plain dictionaries, in the words of the original's users.

Keys say from what to what: `gpu_id2seq_lens` maps a global rank to the lengths of the sequences at home there. A chunk
is a token shard; chunk ids follow (sequence id, start), so they rise with the sequence id on every rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from knapformer.plan.arrays import Int64Array
from knapformer.plan.cost import CostModel
from knapformer.plan.placement import Placement


def summarize(placement: Placement, cost: CostModel, gpu_ids: Sequence[int] | None = None) -> dict[str, Any]:
    """Summary of a placement.

    Args:
        placement: the placement.
        cost: prices of the workloads reported [s, per layer, forward].
        gpu_ids: global rank of each rank of the placement; default 0, 1, ...
    """
    s, t = placement.sequences, placement.token_shards
    gpu = list(range(placement.world_size)) if gpu_ids is None else list(gpu_ids)
    work = cost.work(s.length) / 1e15
    chunk = np.arange(len(t))

    def at_home(values: np.ndarray) -> dict[int, list[Any]]:
        return {g: values[s.of_rank(r)].tolist() for r, g in enumerate(gpu)}

    def per_rank(rank: Int64Array, values: np.ndarray) -> dict[int, list[Any]]:
        return {g: values[rank == r].tolist() for r, g in enumerate(gpu)}

    home = s.home[t.seq]
    return {
        "balance_gpu_ids": gpu,
        "seq_id2seq_len": dict(enumerate(s.length.tolist())),
        "seq_id2seq_workload": dict(enumerate(work.tolist())),
        "gpu_id2seq_ids": at_home(np.arange(len(s))),
        "gpu_id2seq_lens": at_home(s.length),
        "gpu_id2seq_workloads": at_home(work),
        "gpu_id2chunk_ids": per_rank(home, chunk),
        "gpu_id2chunk_lens": per_rank(home, t.count),
        "balance_gpu_id2chunk_ids": per_rank(t.rank, chunk),
        "balance_gpu_id2chunk_lens": per_rank(t.rank, t.count),
        "balance_chunk_id2gpu_id": {c: gpu[r] for c, r in enumerate(t.rank.tolist())},
        "balance_chunk_id2chunk_len": dict(enumerate(t.count.tolist())),
        "chunk_id2seq_id": dict(enumerate(t.seq.tolist())),
    }
