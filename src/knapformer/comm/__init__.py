"""All of the library's collectives: groups, the gather of small integers, and one differentiable exchange of rows."""

from knapformer.comm.exchange import DeviceExchange, Transfer, exchange, start_exchange
from knapformer.comm.gather import LengthGather, agree, gather_integers
from knapformer.comm.groups import RankGroup, partition

__all__ = [
    "DeviceExchange",
    "LengthGather",
    "RankGroup",
    "Transfer",
    "agree",
    "exchange",
    "gather_integers",
    "partition",
    "start_exchange",
]
