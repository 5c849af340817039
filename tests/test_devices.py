"""Which device, backend, kernels, threads and network interface a process gets. In the tests' own
process: the devices are pretended."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import SCRIPTS
from helpers.parts import Made, every_ddp_script, made, set_up


def pretend(monkeypatch, type: str, count: int) -> None:
    found = lambda check_available=False: torch.device(type)  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("type", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("script", "nodes"), [(SCRIPTS[2], 1), *((name, n) for name in SCRIPTS[3:] for n in (1, 2))]
)
def test_a_process_gets_its_device_its_threads_and_its_interface(
    parse, monkeypatch, type, script, nodes
):
    """The last of two processes a node, which has four devices and eight cores."""
    options = ("--timeout", 9, *(() if script == "ddp_torchrun.py" else ("--nproc-per-node", 2)))
    if script == "multinode.py":
        init = ("--init-method", "tcp://127.0.0.1:9")
        options += (*init, "--rank", nodes - 1, "--world-size", nodes)
    module, args = parse(script, *options)
    args.device, given, indices, threads = type, {}, [], []
    ranks = {"RANK": 2 * nodes - 1, "WORLD_SIZE": 2 * nodes, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    environment = {name: str(value) for name, value in ranks.items()}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: given.update(kwargs))
    monkeypatch.setattr(dist, "get_backend", lambda: "any")
    monkeypatch.setattr(module, "open_store", lambda args: None, raising=False)
    device = set_up(module, args, 1)
    if type == "cuda":
        assert device == given["device_id"] == torch.device("cuda", 1) and indices == [1]
    else:
        assert device == torch.device("cpu") and given["device_id"] is None and indices == []
    assert threads == [4]
    assert given["timeout"].seconds == 9 or script == "multinode.py"
    assert (given["rank"], given["world_size"]) == (2 * nodes - 1, 2 * nodes)
    if script != "multinode.py":  # it listens where its address says
        loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform) if nodes == 1 else None
        assert environment.get("GLOO_SOCKET_IFNAME") == loopback
        assert environment.get("NCCL_SOCKET_IFNAME") == loopback


@every_ddp_script
def test_deterministic_kernels_come_before_the_process_group(make, monkeypatch, parse, script):
    module, _ = parse(script)
    calls, init = [], dist.init_process_group
    monkeypatch.setattr(module, "use_deterministic_kernels", lambda: calls.append("kernels"))
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, **kw: calls.append("group") or init(*args, **kw)
    )
    make(script, "--deterministic")
    make(script)
    assert calls == ["kernels", "group", "group"]


@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_deterministic_kernels_are_asked_for(make, monkeypatch, parse, script):
    module, _ = parse(script)
    calls = []
    monkeypatch.setattr(module, "use_deterministic_kernels", lambda: calls.append("kernels"))
    make(script, "--deterministic")
    make(script)
    assert calls == ["kernels"]


@every_ddp_script
@pytest.mark.parametrize("built", [True, False])
def test_gloo_is_taken_where_nccl_is_not_built(parse, monkeypatch, script, built):
    """As on Windows with an NVIDIA GPU."""
    module, args = parse(script)
    args.device, asked = "cuda", []
    if script == "ddp_torchrun.py":
        monkeypatch.setattr(dist, "HashStore", lambda: None)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: built or name != "nccl")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: asked.append(backend))
    monkeypatch.setattr(dist, "get_backend", lambda: "any")
    set_up(module, args)
    assert asked == ["nccl" if built else "gloo"]


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_no_libuv_on_windows(parse, monkeypatch, platform):
    options = ("--init-method", "tcp://127.0.0.1:9", "--world-size", 2, "--rank", 0)
    module, args = parse("multinode.py", *options)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **given: SimpleNamespace(**given))
    monkeypatch.setattr(sys, "platform", platform)
    assert module.open_store(args).use_libuv == (platform != "win32")


@pytest.mark.parametrize(
    ("script", "store"), [("ddp_spawn.py", dist.FileStore), ("ddp_torchrun.py", dist.HashStore)]
)
def test_the_processes_of_one_host_meet_without_a_port(parse, monkeypatch, script, store):
    module, args = parse(script)
    given = {}
    monkeypatch.setattr(dist, "init_process_group", lambda _, **kwargs: given.update(kwargs))
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    set_up(module, args)
    assert type(given["store"]) is store


@pytest.mark.parametrize("script", ["single_gpu.py", *SCRIPTS[2:]])
def test_macs_have_no_ddp(parse, monkeypatch, script):
    parse(script)
    pretend(monkeypatch, "mps", 1)
    args = parse(script)[1]
    assert args.device == ("mps" if script == "single_gpu.py" else "cpu")


def test_the_device_is_the_one_that_was_asked_for(parse, monkeypatch):
    parse("single_gpu.py")
    pretend(monkeypatch, "cuda", 2)
    seen = {}
    for options, expected in (((), "cuda"), (("--device", "cpu"), "cpu")):
        module, args = parse("single_gpu.py", *options)
        monkeypatch.setattr(module, "load_train_objs", lambda args, device: made(seen, device))
        with pytest.raises(Made):
            module.main(args)
        assert seen["trainer"] == (torch.device(expected),)


def test_torchrun_may_not_start_more_processes_than_devices(command_line, refuse, monkeypatch):
    command_line("ddp_torchrun.py")
    pretend(monkeypatch, "cuda", 2)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert "3 processes are more than 2 devices" in refuse("ddp_torchrun.py")


@pytest.mark.parametrize("script", ["ddp_spawn.py", "multinode.py"])
def test_a_process_for_each_device_and_no_more(parse, refuse, monkeypatch, script):
    parse(script)
    pretend(monkeypatch, "cuda", 2)
    assert parse(script)[1].nproc_per_node == 2
    on_cpu = parse(script, "--device", "cpu")[1].nproc_per_node
    assert on_cpu == (2 if script == "ddp_spawn.py" else 1)
    assert parse(script, "--device", "cpu", "--nproc-per-node", 3)[1].nproc_per_node == 3
    options = ("--rank", 0, "--world-size", 1) if script == "multinode.py" else ()
    assert "3 processes are more than 2 devices" in refuse(script, *options, "--nproc-per-node", 3)
