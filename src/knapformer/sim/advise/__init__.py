"""The advisor: is balancing worth it for one's own data set, what to set, what it will cost. Reading order: `columns`,
`engine`, `query`, `scan`, `histogram`; `buckets`, `memory`, `policies`; `sources`, `advice`, `verdict`."""

from knapformer.sim.advise.advice import AdviseOptions, advise
from knapformer.sim.advise.query import ScanOptions

__all__ = ["AdviseOptions", "ScanOptions", "advise"]
