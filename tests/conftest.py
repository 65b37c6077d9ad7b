"""Settings shared by all tests. The multi-rank harness is in `tests/ranks.py`."""

from tests.ranks import close_pools


def pytest_unconfigure() -> None:
    close_pools()
