"""What planning ahead of loading saves: tokens that move when samples are read anywhere, or where they will be used.

    python -m benchmarks.sampler -o benchmarks/results/sampler.jsonl

The lengths of a workload are a data set; steps of as many samples as the workload has are dealt to ranks blindly
(`EpochSampler`) and by plan (`BalancedSampler`), and planned by the balanced planner either way. No timing.
"""

import numpy as np
from benchmarks.common import ShortRecord, make_parser

from knapformer.data import BalancedSampler, EpochSampler, load_workload
from knapformer.plan import Cluster, CostModel, Limits, Placement, Sequences, make_planner, measure

COST = CostModel.from_shapes(3072, 24, gamma=1.25)
WORKLOADS = ("flux-lowres-32", "flux-mixed-32", "flux-joint-32", "real-mix-32", "video-v50-32")


def main() -> None:
    parser = make_parser(__doc__, "sampler.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    for name in WORKLOADS:
        trace = load_workload(name)
        lengths = np.concatenate([row for step in trace.steps for row in step.seq_lens])
        batch, cluster = len(trace.sequences(0)), Cluster(trace.world_size, 8)
        planned = BalancedSampler(lengths, batch, cost=COST, cluster=cluster)
        blind = EpochSampler(len(lengths), batch, world_size=trace.world_size)
        found = []
        with ShortRecord(args.output, name, {"batch": batch, "ranks": trace.world_size}) as record:
            for step in range(min(args.steps, len(blind))):
                samples = blind.global_batch()
                usual = plan(make_planner("balanced"), lengths, blind.deal(samples), cluster)
                ahead = plan(planned.planner, lengths, planned.deal(samples), cluster)
                split = float(ahead.sequences.length[ahead.split].sum() / ahead.sequences.num_tokens)
                values = {"split_tokens": split}
                for kind, placement in (("blind", usual), ("ahead", ahead)):
                    metrics = measure(placement, cluster, COST)
                    values[f"routed_{kind}"] = metrics.routed_fraction
                    values[f"imbalance_{kind}"] = metrics.time_imbalance
                    values[f"split_traffic_{kind}"] = metrics.split_traffic
                record.step(step, **values)
                found.append(values)
                blind.advance()
        mean = {key: float(np.mean([values[key] for values in found])) for key in found[0]}
        print(f"{name:16}", "  ".join(f"{key} {value:.3f}" for key, value in mean.items()))


def plan(planner, lengths: np.ndarray, dealt: list[list[int]], cluster: Cluster) -> Placement:
    return planner(Sequences.from_ranks([lengths[samples].tolist() for samples in dealt]), cluster, COST, Limits())


if __name__ == "__main__":
    main()
