"""Runs anywhere: the device, the backend, the threads and the network interface of a process.

The devices are pretended; test_gpu.py is for real ones.
"""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import SCRIPTS
from helpers.parts import every_ddp_script, set_up


def pretend(monkeypatch, type: str, count: int) -> None:
    found = lambda check_available=False: torch.device(type)  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("type", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("script", "nodes"), [(SCRIPTS[2], 1), *((name, n) for name in SCRIPTS[3:] for n in (1, 2))]
)
def test_a_process_gets_its_device_its_threads_and_its_interface(
    parse, monkeypatch, capsys, type, script, nodes
):
    """The last of two processes a node, which has four devices and eight cores."""
    options = () if script == "ddp_torchrun.py" else ("--nproc-per-node", 2)
    if script == "multinode.py":
        options += ("--rank", nodes - 1, "--world-size", nodes)
        options += ("--init-method", "tcp://127.0.0.1:9")
    module, args = parse(script, *options)
    args.device, given, indices, threads = type, {}, [], [8]
    rank, world_size = 2 * nodes - 1, 2 * nodes
    ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    environment = {name: str(value) for name, value in ranks.items()}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: given.update(kwargs))
    monkeypatch.setattr(dist, "get_backend", lambda: "any")
    monkeypatch.setattr(module, "open_store", lambda args: None, raising=False)
    device = set_up(module, args, 1)
    assert str(device) == ("cuda:1" if type == "cuda" else "cpu")
    assert given["device_id"] == (device if type == "cuda" else None)
    assert indices == ([1] if type == "cuda" else [])
    assert (given["rank"], given["world_size"]) == (rank, world_size)
    line = f"[rank {rank} of {world_size}] device {device} | backend any | threads 4\n"
    assert capsys.readouterr().out == line and threads == [8, 4]
    if script != "multinode.py":  # it listens where its address says
        loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform) if nodes == 1 else None
        assert environment.get("GLOO_SOCKET_IFNAME") == loopback
        assert environment.get("NCCL_SOCKET_IFNAME") == loopback


@every_ddp_script
@pytest.mark.parametrize("built", [True, False])
def test_gloo_is_taken_where_nccl_is_not_built(parse, monkeypatch, script, built):
    """As on Windows with an NVIDIA GPU. The processes of one node meet without a port."""
    module, args = parse(script)
    args.device, given = "cuda", {}
    monkeypatch.setattr(dist, "is_backend_available", lambda name: built or name != "nccl")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **named: given.update(named, backend=backend)
    )
    monkeypatch.setattr(dist, "get_backend", lambda: "any")
    set_up(module, args)
    assert given["backend"] == ("nccl" if built else "gloo")
    assert isinstance(given["store"], dist.FileStore | dist.HashStore)


@pytest.mark.parametrize("script", ["single_gpu.py", *SCRIPTS[2:]])
def test_macs_have_no_ddp(parse, monkeypatch, script):
    pretend(monkeypatch, "mps", 1)
    assert parse(script)[1].device == ("mps" if script == "single_gpu.py" else "cpu")


@every_ddp_script
def test_a_process_for_each_device_and_no_more(parse, refuse, monkeypatch, script):
    pretend(monkeypatch, "cuda", 2)
    options = ("--nproc-per-node", 3)
    if script == "multinode.py":
        options += ("--rank", 0, "--world-size", 1)
    if script == "ddp_torchrun.py":
        options = ()
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    else:
        on_cpu = parse(script, "--device", "cpu")[1].nproc_per_node
        assert on_cpu == (2 if script == "ddp_spawn.py" else 1)
        assert parse(script)[1].nproc_per_node == 2
    assert "3 processes are more than 2 devices" in refuse(script, *options)
