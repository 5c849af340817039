"""How multinode.py's ranks join, and what it says of those that cannot. In the tests' own process.

On real nodes: test_multinode.py. What is refused before that: test_errors.py.
"""

import runpy
import signal
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import ROOT, set_up

NODES = "multinode.py"


@pytest.fixture
def four_devices(command_line, monkeypatch):
    """Pretended; and joining does nothing. These are the arguments that torch would get."""
    given = {}
    cuda = lambda check_available=False: torch.device("cuda")  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda _, **named: given.update(named))
    monkeypatch.setattr(dist, "get_backend", lambda: "any")
    monkeypatch.setattr(dist, "get_rank", lambda: given["rank"])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return given


@pytest.mark.parametrize(
    ("environment", "options", "number", "rank", "device"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8"}, (), 0, 5, 0),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, (), 0, 5, 3),
        ({}, ("--rank", 4, "--world-size", 8, "--nproc-per-node", 4), 3, 7, 3),
        ({"LOCAL_RANK": "2"}, ("--rank", 4, "--world-size", 8, "--nproc-per-node", 2), 1, 5, 3),
    ],
)
def test_ranks_count_processes(
    command_line, four_devices, monkeypatch, environment, options, number, rank, device
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    module = command_line(NODES, "--init-method", "tcp://node:7000", *options)
    assert set_up(module, module.parse_args(), number) == torch.device("cuda", device)
    assert (four_devices["rank"], four_devices["world_size"]) == (rank, 8)
    assert four_devices["init_method"] == "tcp://node:7000"


def test_a_device_that_is_not_there_is_refused(refuse, four_devices, monkeypatch):
    options = ("--rank", 0, "--world-size", 8, "--nproc-per-node")
    line = "device 4 is not here: this node has 4 devices, counted from 0"
    assert refuse(NODES, *options, 5) == line
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert refuse(NODES, *options, 2) == line


def test_it_says_for_whom_it_waits_and_which_devices_it_leaves(
    command_line, four_devices, monkeypatch, capsys
):
    options = ("--init-method", "tcp://node:7000", "--rank", 1, "--world-size", 8, "--timeout", 9)
    monkeypatch.setattr(mp, "spawn", lambda *_, **__: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def said(*more: object) -> list[str]:
        command_line(NODES, *options, *more)
        runpy.run_path(str(ROOT / NODES), run_name="__main__")
        return capsys.readouterr().out.splitlines()[1:-1]

    waits = "rank 1 waits for all 8 at tcp://node:7000, up to 9 s"
    first, second = said()
    assert first.startswith("only 1 of 4 devices: --nproc-per-node 4 ") and second == waits
    assert said("--nproc-per-node", 4) == said("--device", "cpu") == [waits]
    monkeypatch.setenv("LOCAL_RANK", "0")  # the others are for the other calls
    assert said() == [waits]


@pytest.fixture
def cannot(parse):
    """cannot(rank, init_method) -> why it cannot join within a second."""

    def cannot(rank: int, init_method: str) -> str:
        options = ("--init-method", init_method, "--rank", rank, "--world-size", 2, "--timeout", 1)
        module, args = parse(NODES, *options)
        with pytest.raises(SystemExit) as caught:
            set_up(module, args)
        assert "\n" not in caught.value.code
        return caught.value.code

    return cannot


@pytest.mark.parametrize(
    ("init_method", "reason"),
    [
        ("localhost:7000", "No rendezvous handler for localhost://"),
        ("tcp://localhost", "port number missing"),
        ("tcp://:7000", "hostname cannot be None"),
        ("tcp://localhost:70000", "Port out of range 0-65535"),
        ("tcp://no.such.host:1", "timed out"),
        ("tcp://127.0.0.1:9", "timed out"),  # nobody listens there
        ("tcp://192.0.2.1:7000", "timed out"),  # nor is this an address of this machine
    ],
)
def test_one_line_names_the_rank_the_address_and_torchs_reason(cannot, init_method, reason):
    rank = 0 if "192.0" in init_method else 1
    line = cannot(rank, init_method)
    assert line.startswith(f"error: rank {rank} cannot join at {init_method}: ") and reason in line


def test_a_port_in_use_a_missing_variable_and_nobody_else(cannot, monkeypatch, tmp_path):
    with socket.create_server(("", 0)) as other:
        url = f"tcp://localhost:{other.getsockname()[1]}"
        assert cannot(0, url).startswith(f"error: rank 0 cannot join at {url}: ")
    start = "error: rank 0 cannot join at env://$MASTER_ADDR:7000: "
    monkeypatch.setenv("MASTER_PORT", "7000")
    assert cannot(0, "env://").startswith(start)
    assert f"{tmp_path}/store: " in cannot(0, f"file://{tmp_path}/store")
