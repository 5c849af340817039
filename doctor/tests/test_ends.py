"""How jobs end: a hang is no slow work, an error not the doctor's own, and a stop tears nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import PACKAGE

HEAD = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
torch.manual_seed(1 + rank)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def epoch(number):
    sampler.set_epoch(number)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def run(work: Path, program: str, *options: str) -> tuple[int, str, str]:
    (work / "train.py").write_text(HEAD + program)
    command = [sys.executable, str(PACKAGE), *options, "torchrun", "--standalone"]
    command += ["--nproc_per_node=2", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout, done.stderr


def test_a_hang_says_where_each_rank_stands(tmp_path: Path) -> None:
    program = (
        "epoch(0)\nif rank == 0:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(3))\n"
    )
    program += "    dist.barrier()\n"
    status, out, _ = run(tmp_path, program, "--patience", "4")
    assert status == 1
    line = next(line for line in out.splitlines() if "no rank goes on" in line)
    assert "rank 0 stands at train.py:" in line
    assert "rank 0: barrier" in line


def test_slow_work_is_no_hang_and_signals_are_the_programs(tmp_path: Path) -> None:
    """One rank works for three times the patience, while the other one waits for it."""
    program = """
got = []
for name in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(name, lambda n, f: got.append(n))
epoch(0)
if rank == 0:
    for _ in range(3): os.kill(os.getpid(), signal.SIGUSR1); time.sleep(4)
    with open("state.pt", "wb") as file: torch.save(model.state_dict(), file)
    assert got == [signal.SIGUSR1] * 3
dist.barrier()
epoch(1)
print("trained", flush=True)
"""
    status, out, error = run(tmp_path, program, "--patience", "4")
    assert out.count("trained") == 2, error
    assert (status, "0 found" in out) == (0, True), out


def test_minutes_end_a_job_where_no_file_is_torn(tmp_path: Path) -> None:
    program = """
for n in range(10**6):
    epoch(n)
    if rank == 0:
        with open(f"state-{n % 50}.bin", "wb") as file:
            for _ in range(100): file.write(b"x" * 1000); file.flush()
"""
    (tmp_path / "state-3.bin").write_text("old")
    file = tmp_path / "found.json"
    status, out, _ = run(tmp_path, program, "--minutes", "0.8", "--json", str(file))
    assert status == 0
    assert "NOTE the program: the job was ended after 0.8 minutes" in out
    assert [one["label"] for one in json.loads(file.read_text())["found"]] == ["NOTE"]
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("state-*.bin")}
    assert sizes.pop("state-3.bin") == 3
    assert {*sizes.values()} == {100_000}


def test_an_error_is_the_programs_and_its_traceback_is_as_without(tmp_path: Path) -> None:
    program = "epoch(0)\nif rank == 1: model(torch.ones(2, 5))\ndist.barrier()\n"
    status, out, error = run(tmp_path, program)
    assert status == 1
    assert re.search(
        r"FOUND train.py:\d+: rank 1 ends after 4 steps; the error is RuntimeError", out
    )
    assert "ddp_doctor" not in error


def test_an_error_in_the_doctor_is_the_doctors(tmp_path: Path) -> None:
    """A frame of its own in the stack, which is not that of a function that it calls for you."""
    program = """
import ddp_doctor.watch.hooks as hooks
where = hooks.where
epoch(0)
if rank == 1: hooks.around(3, 5)(None)
dist.barrier()
"""
    status, out, error = run(tmp_path, program)
    assert status == 2
    assert "error: the doctor failed: put(): TypeError" in error
    assert "FOUND" not in out
