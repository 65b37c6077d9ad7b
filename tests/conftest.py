"""Settings shared by all tests. The multi-rank harness is in `tests/ranks.py`."""

import gc
import os

from hypothesis import settings

from tests.ranks import close_pools

# For torch here, which test modules import later, and in processes that tests start. Threads of one small tensor that
# wait for each other on a busy machine make tests eight times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The deadline of an example is wall time, which a shared machine does not keep.
settings.register_profile("knapformer", deadline=None)
settings.load_profile("knapformer")


def pytest_collection_finish() -> None:
    """Modules stay, so no collection need look at them again: code that collects after each cell took 0.5 s a time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    close_pools()
