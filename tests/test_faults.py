"""After a random fault in a job, --resume ends with the bytes of a run that nothing disturbed.

FAULTS=100 .venv/bin/pytest -m slow tests/test_faults.py     (5 without the variable)
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from helpers.files import idx_files, load, same_bytes
from helpers.hosts import require, requirements, run
from helpers.jobs import NODE2, SCRIPTS, SPAWN2, TORCHRUN, Job
from helpers.ranks import train

LAUNCHES = dict(zip(SCRIPTS, ((SCRIPTS[0],), (SCRIPTS[1],), SPAWN2, (), NODE2), strict=True))
# Within an epoch a resumed run draws other numbers for dropout, so this one has none.
LAUNCHES[SCRIPTS[3]] = (TORCHRUN.format("2 --max-restarts=3"), "--resume", "--save-steps", 7)
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
OF_ONE = [*((name, "all") for name in SIGNALS), ("full", "disk")]
OF_SEVERAL = [*OF_ONE, *((name, whom) for name in SIGNALS for whom in ("parent", "rank"))]


@pytest.fixture
def disk(tmp_path):
    """A folder on a disk of 16 MB."""
    require(requirements())
    path = tmp_path / "disk"
    path.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", path)
    yield path
    run("umount", path)


def strike(job: Job, what: str, whom: str, draw: random.Random, disk: Path) -> None:
    if what == "full":
        with contextlib.suppress(OSError):  # no space left
            (disk / "filler").write_bytes(bytes(16 << 20))
        return
    parent = job.process.pid
    pids = {"all": job.pids(), "parent": [parent], "rank": job.workers() or [parent]}[whom]
    for pid in [draw.choice(pids)] if whom == "rank" else pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[what])


@pytest.mark.slow("five jobs by their real command lines, and as many resumed ones")
@pytest.mark.parametrize("seed", range(5, 5 + int(os.environ.get("FAULTS", 5))))
def test_the_same_bytes_after_a_random_fault(start, disk, tmp_path, record_property, seed):
    draw, script = random.Random(seed), SCRIPTS[seed % len(SCRIPTS)]
    several = script in SCRIPTS[2:]
    what, whom = draw.choice(OF_SEVERAL if several else OF_ONE)
    epoch, seconds = draw.randrange(-1, 4), draw.uniform(0, 1)
    if (what, whom) == ("SIGKILL", "parent") and (script == SCRIPTS[3] or epoch < 0):
        whom = "all"  # torchrun leaves its ranks then, and mp.spawn those that import torch
    fault = f"{script}: {what} {whom}, {seconds:.2f} s after epoch {epoch}"
    options = (5, "--dataset", "fashion-mnist", "--data-dir", idx_files(tmp_path, 1200, 10))
    options += ("--model", "mlp" if script == SCRIPTS[3] else "convnet")
    options += ("--batch-size", 8, "--snapshot-path")
    train(tmp_path, script, 1 + several, *options, tmp_path / "whole.pt")
    options += (disk / "snapshot.pt", *(("--timeout", 10) if several else ()))
    launch, *more = LAUNCHES[script]
    job = start(launch, *options, *more, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    if epoch >= 0:
        job.wait_for(f"^Epoch {epoch} .*samples/s$")
    time.sleep(seconds if epoch >= 0 else 4 * seconds)
    strike(job, what, whom, draw, disk)
    job.finish(None)  # and no process is left
    record_property(fault, job.process.returncode)
    (disk / "filler").unlink(missing_ok=True)
    train(tmp_path, script, 1 + several, *options, "--resume")
    snapshot = load(disk / "snapshot.pt")
    assert snapshot["epoch"] == 5 and same_bytes(snapshot, load(tmp_path / "whole.pt"))
    assert [path.name for path in disk.iterdir()] == ["snapshot.pt"]
