"""Ctrl-C, SIGTERM or the death of a process ends the whole job, and nobody is left.

Four scripts end at once; ddp_torchrun.py saves first. Jobs come first, and then who stops when and
who waits for whom, in the tests' process. Stops of single ranks: test_resume.py.
"""

import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.files import load, same_bytes
from helpers.jobs import ALONE, TORCHRUN, Job

SINGLE, PARALLEL = ("single_gpu.py",), ("data_parallel.py",)
SPAWN2 = ("ddp_spawn.py", "--nproc-per-node", 2)
NODE2 = ("multinode.py", *ALONE, "--nproc-per-node", 2)
STOPPED = ["stopped: --resume goes on from the last snapshot"]
KILLED = [
    "error: process 1 terminated with signal SIGKILL: --resume goes on from the last snapshot"
]
ORDINARY = r"total_epochs: |\[rank |\[CPU|Epoch |W\d+ .*Terminating process"


def end(job: Job, how: str) -> tuple[int, list[str]]:
    """The status that the job ends with then, and what it says."""
    pid = job.process.pid
    if how == "SIGKILL of rank 1":
        os.kill(job.workers()[1], signal.SIGKILL)
        return 1, KILLED
    if how == "SIGKILL of the parent":
        os.kill(pid, signal.SIGKILL)
        return -signal.SIGKILL, []
    if how == "SIGTERM to all":
        for each in job.pids():
            os.kill(each, signal.SIGTERM)
    elif how == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    else:
        for _ in range(2 if how == "Ctrl-C, twice" else 1):
            os.killpg(pid, signal.SIGINT)
    return (143 if "SIGTERM" in how else 130), STOPPED


@pytest.mark.parametrize(
    ("launch", "how", "forked"),
    [
        (SINGLE, "SIGTERM", True),
        (SINGLE, "Ctrl-C, twice", True),
        (PARALLEL, "SIGTERM", True),
        (PARALLEL, "Ctrl-C, twice", True),
        (SPAWN2, "SIGTERM", True),
        (SPAWN2, "SIGTERM to all", True),
        (SPAWN2, "Ctrl-C, twice", True),
        (SPAWN2, "Ctrl-C", False),
        (SPAWN2, "SIGKILL of the parent", True),
        (SPAWN2, "SIGKILL of rank 1", True),
        ((*SPAWN2, "--num-workers", 1), "SIGKILL of rank 1", True),
        (NODE2, "SIGTERM to all", True),
        (NODE2, "Ctrl-C, twice", True),
        (NODE2, "SIGKILL of the parent", True),
        (NODE2, "SIGKILL of rank 1", True),
    ],
)
def test_a_job_ends_at_once_and_keeps_its_last_snapshot(
    start, tmp_path, fashion, launch, how, forked
):
    script, *options = launch
    job = start(script, 999, *options, *fashion(200, 10), "--log-interval", 1, fork=forked)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    status, said = end(job, how)
    text = job.finish(status, seconds=30)
    assert [line for line in text.splitlines() if not re.match(ORDINARY, line)] == said, text
    # It may have been saved, and not yet said.
    assert load(tmp_path / "checkpoint.pt")["epoch"] - text.count("checkpoint saved") in (0, 1)


@pytest.mark.parametrize(
    "how",
    [
        "SIGTERM to all",
        "SIGKILL of the parent",
        pytest.param("Ctrl-C", marks=pytest.mark.slow("torchrun passes it on like SIGTERM")),
    ],
)
def test_torchruns_workers_save_in_mid_epoch(fork, start, tmp_path, fashion, how):
    """The loader's workers go on until then. (Status 1 is torchrun's.)"""
    launch = TORCHRUN.format(2)
    options = (1, *fashion(400, 10), "--model", "convnet", "--batch-size", 8, "--num-workers", 1)
    fork(launch, *options[:-2], "--snapshot-path", "whole.pt")
    job = start(launch, *options, "--log-interval", 1, LADDER_SLOW=0)
    job.wait_for(r"^\[CPU\d\] Epoch 0 " if how == "SIGTERM to all" else r"Epoch 0 \| Step 7 ")
    end(job, how)
    late = time.monotonic() + 60
    while job.pids() and time.monotonic() < late:  # also where the parent has ended
        time.sleep(0.05)
    text = job.finish(None)
    assert job.process.returncode == (-signal.SIGKILL if how == "SIGKILL of the parent" else 1)
    (seen,) = re.findall(r"^Epoch 0 \| Stopped at sample (\d+), saved$", text, re.M)
    # torchrun shows a traceback of its own
    assert 'ddp_torchrun.py", line' not in text and "DataLoader worker" not in text, text
    whole, stopped = load(tmp_path / "whole.pt"), load(tmp_path / "checkpoint.pt")
    assert 0 < stopped["samples_seen"] == int(seen) < 400 and not same_bytes(stopped, whole)
    fork(launch, *options[:-2], "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), whole)


def test_the_ranks_ask_each_other_at_every_tenth_step_or_after_each_slow_one(make, monkeypatch):
    """Ten slow ones may take longer than torchrun waits for a stop."""
    _, trainer = make("ddp_torchrun.py", "--batch-size", 2)
    trainer.asked, trainer.ask_every = time.perf_counter(), 1
    asked, all_reduce = [], dist.all_reduce
    counted = lambda *args, **kwargs: asked.append(1) or all_reduce(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(dist, "all_reduce", counted)
    for seconds, every in ((2, 1), (0, 10), (11, 1), (2, 1), (0, 10), (9, 10)):
        trainer.asked -= seconds
        assert trainer._stop_agreed(10, last=False) == 0 and trainer.ask_every == every
    assert len(asked) == 6
    trainer._stop_agreed(11, last=False)
    assert len(asked) == 6
    trainer._stop_agreed(11, last=True)
    assert len(asked) == 7


@pytest.mark.parametrize("script", ["ddp_spawn.py", "multinode.py"])
def test_a_process_whose_parent_was_killed_meanwhile_ends(make, monkeypatch, script):
    parents = iter([SimpleNamespace(is_alive=lambda: False)])
    monkeypatch.setattr(mp, "parent_process", lambda: next(parents))
    with pytest.raises(SystemExit, match="1"):
        make(script)
