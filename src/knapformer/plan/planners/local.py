"""No balancing: every sequence whole on its home rank. The identity that other planners are compared with."""

from dataclasses import dataclass

from knapformer.plan.cluster import Cluster
from knapformer.plan.cost import CostModel
from knapformer.plan.placement import Placement
from knapformer.plan.planners.base import Limits
from knapformer.plan.sequences import Sequences


@dataclass(frozen=True, slots=True)
class LocalPlanner:
    """Leaves every sequence at home. Limits do not apply: it is what happens without a balancer."""

    name: str = "local"

    def __call__(
        self, sequences: Sequences, cluster: Cluster, cost: CostModel, limits: Limits | None = None
    ) -> Placement:
        return Placement.whole(
            sequences,
            sequences.home,
            world_size=cluster.world_size,
            num_heads=cost.num_heads,
            planner=self.name,
            skip_reason="planner 'local' never moves a sequence",
        )
