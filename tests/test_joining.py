"""multinode.py's roll call: who is missing, double or wrong is named. In the tests' own process.

On real nodes: test_multinode.py. What is refused before that: test_errors.py.
"""

import re
import signal
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def test_numbers_of_the_environment_count_processes(command_line, monkeypatch):
    """So each call starts one, also on a node with four devices."""
    module = command_line("multinode.py", "--init-method", "tcp://localhost:7000")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    args = module.parse_args()
    assert (args.rank, args.world_size, args.nproc_per_node) == (5, 8, 1)


def test_calls_on_one_host_share_its_cores_and_devices(parse, monkeypatch, tmp_path):
    """Rank 2 of four calls of two processes: rank 0 is on its host, ranks 1 and 3 on another."""
    options = ("--init-method", f"file://{tmp_path}/store", "--nproc-per-node", 2)
    module, args = parse("multinode.py", *options, "--rank", 2, "--world-size", 4)
    store = dist.FileStore(str(tmp_path / "store"))
    for rank, host in ((0, socket.gethostname()), (1, "another"), (3, "another")):
        store.set(f"--rank {rank}", host)
    module.join(args)
    numbers = []

    def ddp_setup(rank: int, local_rank: int, args: object) -> None:
        numbers.extend((rank, local_rank))
        raise InterruptedError

    monkeypatch.setattr(module, "ddp_setup", ddp_setup)
    monkeypatch.setattr(mp, "parent_process", lambda: SimpleNamespace(is_alive=lambda: True))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(InterruptedError):
        module.main(1, args)
    assert numbers == [5, 3] and args.local_world_size == 4


@pytest.fixture
def refusal(parse):
    """refusal(init_method, rank, world_size, processes=1) -> why it cannot join within a second."""

    def refusal(init_method: str, rank: int, world_size: int, processes: int = 1) -> str:
        options = ("--init-method", init_method, "--rank", rank, "--world-size", world_size)
        module, args = parse("multinode.py", *options, "--nproc-per-node", processes)
        args.timeout = 1
        with pytest.raises(SystemExit) as caught:
            module.join(args)
        return caught.value.code

    return refusal


def test_who_is_missing_double_or_of_another_world(refusal, tmp_path, capsys):
    url = f"file://{tmp_path}/store"
    assert refusal(url, 1, 3) == "error: missing after 1 s: --rank 0, --rank 2"
    assert capsys.readouterr().out == "waiting for --rank 0, --rank 2\n"  # once
    assert refusal(url, 1, 3).startswith("error: there is a --rank 1 already: give each call its")
    for world_size, processes in ((2, 1), (3, 2)):
        ours = f"error: --rank 0 has a world of {world_size} calls of {processes} processes"
        line = f"{ours}, and another rank one of 3 calls of 1 processes"
        assert refusal(url, 0, world_size, processes) == line
    assert refusal(url, 0, 3).endswith("missing after 1 s: --rank 2")  # corrected, it may join


def test_a_port_where_nobody_listens_or_another_program(refusal, capsys):
    with socket.create_server(("", 0)) as other:
        url = f"tcp://localhost:{other.getsockname()[1]}"
        line = refusal(url, 0, 2)
        assert line.startswith(f"error: --rank 0 cannot join at {url}: ") and "EADDRINUSE" in line
    assert re.match(
        rf"error: missing after 1 s: --rank 0 at {url} \(.*refused\)$", refusal(url, 1, 2)
    )
    assert re.match(rf"waiting for --rank 0 at {url} \(.*refused\)\n$", capsys.readouterr().out)
