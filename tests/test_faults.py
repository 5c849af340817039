"""After a random fault in a job, --resume ends with the bytes of a run that nothing disturbed.

FAULTS=40 .venv/bin/pytest -m slow tests/test_faults.py     (6 without the variable)
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from helpers.files import idx_files, load, same_bytes
from helpers.jobs import LONG, SCRIPTS, SPAWN2, TORCHRUN, Job, command
from helpers.ranks import train

SPAWN, ELASTIC, NODES = SCRIPTS[2:]
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
TARGETS = dict.fromkeys((SPAWN, ELASTIC, LONG), ("all", "parent", "rank"))
TARGETS[NODES] = ("all", "rank")
RESTARTED = TORCHRUN.format("2 --max-restarts=3").replace("ddp_torchrun.py", f"recipes/{LONG}")
LAUNCHES = {SPAWN: SPAWN2, ELASTIC: (TORCHRUN.format(2),), LONG: (RESTARTED, "--resume")}
BY_HAND = '"$@" --rank 1 & "$@" --rank 0; wait'  # two processes


def started(script: str, folder: Path, options: tuple) -> Job:
    words = command(*LAUNCHES.get(script, (script,)), *options)
    if script == NODES:
        words += ["--init-method", f"file://{folder}/store", "--world-size", "2"]
        words = ["sh", "-c", BY_HAND, "sh", *words]
    return Job(words, folder, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def strike(job: Job, what: str, whom: str, draw: random.Random) -> None:
    """Send all processes of a job, its first one or one of its ranks this signal."""
    pids = job.pids() if whom == "all" else [job.process.pid]
    for pid in [draw.choice(job.workers() or pids)] if whom == "rank" else pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[what])


@pytest.mark.slow("jobs by their real command lines, and as many resumed ones")
@pytest.mark.parametrize("seed", range(5, 5 + int(os.environ.get("FAULTS", 6))))
def test_the_same_bytes_after_a_random_fault(tmp_path, record_property, seed):
    """That of long_run.py is nearly always in mid-epoch, and torchrun restarts its ranks."""
    draw, script = random.Random(seed), (*SCRIPTS, LONG)[seed % 6]
    processes, path = 2 if script in TARGETS else 1, script
    what, whom = draw.choice(SIGNALS), draw.choice(TARGETS.get(script, ("all",)))
    epoch, seconds = draw.randrange(-1, 4), draw.uniform(0, 1)
    if (what, whom) == ("SIGKILL", "parent") and (script != SPAWN or epoch < 0):
        whom = "all"  # torchrun leaves its ranks then, and mp.spawn those that import torch
    if whom == "rank" and epoch < 0:
        whom = "all"  # the other would wait for a rank that mp.spawn or nobody misses
    fault = f"{script}: {what} {whom}, {seconds:.2f} s after epoch {epoch}"
    options = (5, "--dataset", "fashion-mnist", "--data-dir", idx_files(tmp_path, 600, 10))
    options += ("--model", "convnet", "--batch-size", 8)
    if script == LONG:
        path = f"recipes/{LONG}"
        options += ("--save-steps", 7)
    options += ("--snapshot-path",)
    train(tmp_path, path, processes, *options, tmp_path / "whole.pt")
    options += ("saved/snapshot.pt",)
    job = started(script, tmp_path, options)
    try:
        if epoch >= 0:
            job.wait_for(f"Epoch {epoch} .*samples/s")
        time.sleep(seconds if epoch >= 0 else 4 * seconds)
        strike(job, what, whom, draw)
        job.finish(None)  # and no process is left
    finally:
        job.kill()
    record_property(fault, job.process.returncode)
    train(tmp_path, path, processes, *options, "--resume")
    snapshot = load(tmp_path / "saved" / "snapshot.pt")
    assert snapshot["epoch"] == 5 and same_bytes(snapshot, load(tmp_path / "whole.pt"))
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["snapshot.pt"]
