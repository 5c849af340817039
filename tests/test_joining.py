"""multinode.py's command line and its roll call, in the tests' own process; on real nodes:
test_multinode.py."""

import re
import signal
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TCP = ("--init-method", "tcp://localhost:7000")
WORLD = ("--world-size", 2)
MASTER = {"MASTER_ADDR": "localhost", "MASTER_PORT": 7000}
USAGE = [
    (("--init-method", "tcp://localhost"), {}, "tcp://localhost: write tcp://host:port"),
    (("--init-method", "tcp://localhost:70000"), {}, "tcp://localhost:70000: Port out of range"),
    (("--init-method", "localhost:7000"), {}, "localhost:7000: write tcp://host:port"),
    (("--init-method", "tcp://no.such.host:1"), {}, r"tcp://no.such.host:1: \[Errno"),
    (("--init-method", "tcp://:7000"), {}, "tcp://:7000: write tcp://host:port"),
    (("--init-method", "file://relative/path"), {}, "file://relative/path: "),
    (("--init-method", "file:///no/such/folder/x"), {}, "file:///no/such/folder/x: "),
    ((), {}, "or export MASTER_ADDR and MASTER_PORT"),
    (("--rank", 2, *TCP), {}, "rank 2 is not in a world of 2"),
    (("--rank", -1, *TCP), {}, "argument --rank: -1 is less than 0"),
    (("--epochs", 0, *TCP), {}, "argument --epochs: 0 is less than 1"),
    (TCP, {"TORCHELASTIC_RUN_ID": "x"}, "torchrun starts ddp_torchrun.py"),
]
ENVIRONMENT = [
    ({}, "give --rank and --world-size, or export RANK and WORLD_SIZE"),
    ({"RANK": 0}, "RANK and WORLD_SIZE"),
    ({"WORLD_SIZE": 2}, "RANK and WORLD_SIZE"),
    ({"RANK": 2, "WORLD_SIZE": 2}, "rank 2 is not in a world of 2"),
]


@pytest.mark.parametrize(("arguments", "env", "message"), USAGE, ids=[row[2] for row in USAGE])
def test_usage(refuse, monkeypatch, arguments, env, message):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if "--rank" not in arguments:
        arguments += ("--rank", 1)
    assert re.search(message, refuse("multinode.py", *arguments, *WORLD))


@pytest.mark.parametrize(("env", "message"), ENVIRONMENT)
def test_environment(refuse, monkeypatch, env, message):
    for name, value in (MASTER | env).items():
        monkeypatch.setenv(name, str(value))
    assert re.search(message, refuse("multinode.py"))


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        (("--rank", 1, "--world-size", 2), {}, (1, 2, 4)),  # a node with all its devices
        (("--rank", 1, "--world-size", 2, "--nproc-per-node", 2), {}, (1, 2, 2)),
        ((), {"RANK": 5, "WORLD_SIZE": 8}, (5, 8, 1)),  # a process
    ],
)
def test_numbers_count_calls_and_those_of_the_environment_processes(
    command_line, monkeypatch, arguments, env, expected
):
    module = command_line("multinode.py", *arguments, *TCP)
    for name, value in env.items():
        monkeypatch.setenv(name, str(value))
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    args = module.parse_args()
    assert (args.rank, args.world_size, args.nproc_per_node) == expected


def test_calls_on_one_host_share_its_cores_and_devices(parse, monkeypatch, tmp_path):
    """Rank 2 of four calls of two processes: rank 0 is on its host, ranks 1 and 3 on another."""
    options = ("--init-method", f"file://{tmp_path}/store", "--nproc-per-node", 2)
    module, args = parse("multinode.py", *options, "--rank", 2, "--world-size", 4)
    store = dist.FileStore(str(tmp_path / "store"))
    for rank, host in ((0, socket.gethostname()), (1, "another"), (3, "another")):
        store.set(f"--rank {rank}", host)
    module.join(args)
    seen, threads = {}, []

    def join(backend: str, **given: object) -> None:
        seen.update(given)
        raise InterruptedError

    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(mp, "parent_process", lambda: SimpleNamespace(is_alive=lambda: True))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pytest.raises(InterruptedError):
        module.main(1, args)
    assert (seen["rank"], seen["world_size"], seen["device_id"]) == (5, 8, None)
    assert threads == [2]

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    args.device, args.backend = "cuda", "gloo"
    with pytest.raises(InterruptedError):
        module.main(1, args)
    assert seen["device_id"] == torch.device("cuda", 3)  # rank 0's call has the first two


def test_who_is_missing_double_or_of_another_world(parse, tmp_path, capsys):
    def join(rank: int, world_size: int, processes: int = 1) -> SimpleNamespace:
        options = ("--init-method", f"file://{tmp_path}/store", "--timeout", 1)
        options += ("--rank", rank, "--world-size", world_size, "--nproc-per-node", processes)
        module, args = parse("multinode.py", *options)
        module.join(args)
        return args

    with pytest.raises(SystemExit, match=r"^error: missing after 1 s: --rank 0, --rank 2$"):
        join(1, 3)
    assert capsys.readouterr().out == "waiting for --rank 0, --rank 2\n"
    with pytest.raises(
        SystemExit, match=r"^error: there is a --rank 1 already: give each call its"
    ):
        join(1, 3)
    for rank, world_size, processes in ((0, 2, 1), (0, 3, 2)):
        with pytest.raises(
            SystemExit, match=f"^error: --rank 0 has a world of {world_size} calls of"
        ):
            join(rank, world_size, processes)
    with pytest.raises(SystemExit, match=r"missing after 1 s: --rank 2$"):  # corrected, it may join
        join(0, 3)


def test_whoever_cannot_join_says_for_whom_it_waits(parse, monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def refuse(*_, **__):
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    module, args = parse("multinode.py", *TCP, "--rank", 1, *WORLD, "--timeout", 60)
    with pytest.raises(
        SystemExit, match=r"missing after 60 s: --rank 0 at tcp://localhost:7000 \("
    ):
        module.join(args)
    assert 1060 < now[0] < 1062
    line = "waiting for --rank 0 at tcp://localhost:7000 (refused)\n"
    assert capsys.readouterr().out == line  # once
