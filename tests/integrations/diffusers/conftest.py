"""Tiny models run fastest on one thread, and two threads of many test processes get into each other's way."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread():
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
