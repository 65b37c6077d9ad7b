"""Settings shared by all tests. The multi-rank harness is in `tests/ranks.py`."""

from hypothesis import settings

from tests.ranks import close_pools

# The deadline of an example is wall time, which a shared machine does not keep.
settings.register_profile("knapformer", deadline=None)
settings.load_profile("knapformer")


def pytest_unconfigure() -> None:
    close_pools()
