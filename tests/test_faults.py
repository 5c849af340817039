"""After a random fault in a job, --resume ends with the bytes of a run that nothing disturbed.

    FAULTS=100 .venv/bin/pytest -m slow tests/test_faults.py     (5 without the variable)

docs/reference.md has what came of 100. Needs Linux, root and iproute2, see hosts.py.
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from helpers.files import idx_files, load, same_bytes
from helpers.hosts import Hosts, require, requirements, run
from helpers.jobs import ALONE, SCRIPTS, TORCHRUN, Job, command
from helpers.ranks import train

LAUNCHES = {script: (script, "--timeout", 10) for script in SCRIPTS[2:]}
LAUNCHES |= {script: (script,) for script in SCRIPTS[:2]}
LAUNCHES["ddp_torchrun.py"] = (TORCHRUN.format("2 --max-restarts=3"), "--resume", "--timeout", 10)
LAUNCHES["multinode.py"] += (*ALONE, "--world-size", 2, "--nproc-per-node", 2)
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
OF_ONE = [*((name, "all") for name in SIGNALS), ("full", "disk")]
OF_SEVERAL = [*OF_ONE, *((name, whom) for name in SIGNALS for whom in ("parent", "rank"))]
OF_NODES = [*OF_SEVERAL, ("link", "down")]
FAULTS = dict(zip(SCRIPTS, (OF_ONE, OF_ONE, OF_SEVERAL, OF_NODES, OF_NODES), strict=True))


def begin(hosts: Hosts | None, script: str, options: tuple, folder: Path) -> list[Job]:
    """A job of two processes on this machine, or of one on each of two hosts."""
    if not hosts:
        launch, *more = LAUNCHES[script]
        return [Job(command(launch, *options, *more), folder, {})]
    words = command(script, *options, "--timeout", 10)
    ranks = [hosts.command(rank, words, hosts.exported(rank)) for rank in (0, 1)]
    return [Job(words, folder, {}) for words in ranks]


@pytest.fixture
def disk(tmp_path):
    """A folder on a disk of 8 MB."""
    require(requirements())
    path = tmp_path / "disk"
    path.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path)
    yield path
    run("umount", path)


def strike(job: Job, what: str, whom: str, draw: random.Random, disk: Path) -> None:
    if what == "full":
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        return
    parent = job.process.pid
    pids = {"all": job.pids(), "parent": [parent], "rank": job.workers() or [parent]}[whom]
    for pid in [draw.choice(pids)] if whom == "rank" else pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[what])


@pytest.mark.slow("five jobs by their real command lines, and as many resumed ones")
@pytest.mark.parametrize("seed", range(int(os.environ.get("FAULTS", 5))))
def test_the_same_bytes_after_a_random_fault(disk, tmp_path, record_property, seed):
    draw, script = random.Random(seed), SCRIPTS[seed % len(SCRIPTS)]
    what, whom = draw.choice(FAULTS[script])
    epoch, seconds = draw.randrange(-1, 4), draw.uniform(0, 1)
    fault = f"{script}: {what} {whom}, {seconds:.2f} s after epoch {epoch}"
    print(fault)
    options = (5, "--dataset", "fashion-mnist", "--data-dir", idx_files(tmp_path, 1200, 10))
    options += ("--model", "convnet", "--batch-size", 8, "--snapshot-path")
    processes = 2 if script in SCRIPTS[2:] else 1
    train(tmp_path, script, processes, *options, tmp_path / "whole.pt")
    options += (disk / "snapshot.pt",)
    with Hosts(2) if what == "link" else contextlib.nullcontext() as hosts:
        jobs = begin(hosts, script, options, tmp_path)
        try:
            if epoch >= 0:
                jobs[0].wait_for(f"^Epoch {epoch} .*samples/s$")
            time.sleep(seconds if epoch >= 0 else 4 * seconds)
            if hosts:
                hosts.link(1, up=False)
            else:
                strike(jobs[0], what, whom, draw, disk)
            for job in jobs:
                job.finish(None)  # and no process is left
        finally:
            for job in jobs:
                job.kill()
        record_property(fault, " ".join(str(job.process.returncode) for job in jobs))
        (disk / "filler").unlink(missing_ok=True)
    train(tmp_path, script, processes, *options, "--resume")
    snapshot = load(disk / "snapshot.pt")
    assert snapshot["epoch"] == 5 and same_bytes(snapshot, load(tmp_path / "whole.pt"))
    assert [path.name for path in disk.iterdir()] == ["snapshot.pt"]
