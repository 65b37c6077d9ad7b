"""Starting ranks: each has its number and its share of the cores, and rank 0's result comes back."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from knapformer.errors import SpecError
from knapformer.train.launch import choose_device, device_words, run_on_ranks


def whole(device: torch.device, offset: int) -> dict[str, Any]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "total": int(total), "device": device.type, "threads": torch.get_num_threads()}


def test_the_result_of_rank_0_comes_back() -> None:
    found = run_on_ranks(whole, (10,), ranks=2, device_type="cpu")
    assert found == {"rank": 0, "total": 21, "device": "cpu", "threads": max(1, (os.cpu_count() or 1) // 2)}


def test_a_rank_of_torchrun_joins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = run_on_ranks(whole, (10,), ranks=7, device_type="cpu")
    assert (found["rank"], found["total"]) == (0, 10)
    assert not dist.is_initialized()


def test_what_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="ranks is 0; start at least one"):
        run_on_ranks(whole, (0,), ranks=0, device_type="cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SpecError, match="2 ranks need as many CUDA devices, this machine has 1"):
        run_on_ranks(whole, (0,), ranks=2, device_type="cuda")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device() == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(SpecError, match="device is cuda, but this machine has no CUDA device"):
        choose_device("cuda")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert device_words(torch.device("cpu")) == "cpu, 1 thread"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert device_words(torch.device("cpu"), 2) == "cpu, 3 threads x 2"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    assert (choose_device().type, choose_device("cpu").type) == ("cuda", "cpu")
    assert device_words(torch.device("cuda"), 4) == "A GPU x 4"
