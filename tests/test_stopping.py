"""A signal, an error or the death of a process ends the whole job, and nobody is left.

STARTS=30 .venv/bin/pytest -m slow tests/test_stopping.py     (3 without the variable)

The last snapshot stays whole. What a resumed job makes of it: test_faults.py.
"""

import contextlib
import os
import random
import signal
import time

import pytest
from helpers.files import load
from helpers.jobs import SPAWN2, TORCHRUN, Job

TWO = (TORCHRUN.format(2),)
WORKERS = ("--num-workers", 1)
SLOW = pytest.mark.slow("as slow as the others, and less usual")


def end(job: Job, how: str) -> tuple[int, str]:
    """The status that the job ends with then, and what it says."""
    pid, torchrun = job.process.pid, "torchrun" in job.command[0]
    if how == "SIGKILL of rank 1":
        os.kill(job.workers()[1], signal.SIGKILL)
        return 1, "=====" if torchrun else "process 1 terminated with signal SIGKILL"
    if how.startswith("SIGKILL of "):
        os.kill(pid, signal.SIGKILL)
        return -signal.SIGKILL, ""
    if how == "Ctrl-C":
        os.killpg(pid, signal.SIGINT)
    else:
        os.kill(pid, signal.SIGTERM)
    return (1, "SignalException: Process") if torchrun else (-2, "KeyboardInterrupt")


@pytest.mark.parametrize(
    ("launch", "how"),
    [
        (SPAWN2, "Ctrl-C"),
        (SPAWN2, "SIGKILL of the parent"),
        (TWO, "SIGTERM"),
        pytest.param(SPAWN2, "SIGKILL of a parent with an ampersand", marks=SLOW),
        pytest.param((*SPAWN2, *WORKERS), "SIGTERM", marks=SLOW),
        pytest.param((*SPAWN2, *WORKERS), "SIGKILL of rank 1", marks=SLOW),
    ],
)
def test_a_job_ends_at_once_and_keeps_its_last_snapshot(start, tmp_path, fashion, launch, how):
    """Ranks, and their loaders' workers, also while the others wait in an all-reduce."""
    script, *options = launch
    if "ampersand" in how:  # the shell lets such a job ignore SIGINT, which torch sends its ranks
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = start(script, 999, *options, *fashion(200, 10))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job.wait_for(r"Epoch 1 \| Batchsize: ")
    status, said = end(job, how)
    text = job.finish(status, seconds=30)
    assert said in text
    # It may have been saved, and not yet said.
    assert load(tmp_path / "checkpoint.pt")["epoch"] - text.count("checkpoint saved") in (0, 1)


@SLOW
def test_a_stop_while_another_rank_hangs(start, fashion):
    """The others wait for it in an all-reduce, for torch's half an hour."""
    job = start(*SPAWN2, 999, *fashion(200, 10))
    job.wait_for(r"Epoch 1 \| Batchsize: ")
    os.kill(job.workers()[1], signal.SIGSTOP)
    time.sleep(1)
    os.kill(job.process.pid, signal.SIGINT)
    job.finish(-2, seconds=25)


@pytest.mark.parametrize("launch", [pytest.param(SPAWN2, marks=SLOW), TWO])
def test_an_exception_of_any_rank_ends_all_with_its_traceback(run, fashion, launch):
    text = run(*launch, 9, *fashion(100, 10), status=1, LADDER_RAISE="1:5")
    _, _, report = text.partition("Root Cause (first" if launch is TWO else "-- Process 1")
    assert "in train_epoch" in report and "ArithmeticError: the test's own" in report, text
    assert "Epoch 3 " not in text


@pytest.mark.slow("several starts")
@pytest.mark.parametrize("seed", range(int(os.environ.get("STARTS", 3))))
def test_nobody_is_left_after_a_signal_at_any_moment(start, fashion, seed):
    """Also after a second one, and while the parent and the ranks import torch."""
    draw, both = random.Random(seed), (signal.SIGTERM, signal.SIGINT)
    job = start(*SPAWN2, 999, *fashion(100, 10))
    if seed % 3:  # else the signal comes while the parent imports torch
        job.wait_for("total_epochs: ")
    time.sleep(draw.uniform(0, 8))
    for signum in (both[seed % 2], *draw.choices(both, k=draw.randint(0, 1))):
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if draw.random() < 0.5 else os.kill)(job.process.pid, signum)
        time.sleep(draw.uniform(0.05, 0.5))  # as fast as a finger
    text = job.finish(None, seconds=20)
    # 1: a rank was signalled, too, or Python was importing the tests' site module.
    assert job.process.returncode in (-2, -15, 1), text
