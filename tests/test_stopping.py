"""A signal or an error ends the whole job, and nobody is left. A rank's death: test_faults.py.

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
from helpers.jobs import SPAWN2, TORCHRUN

SLOW = pytest.mark.slow("as slow as the others, and less usual")


@pytest.mark.parametrize(
    ("how", "workers"), [("SIGKILL", 0), pytest.param("SIGTERM", 1, marks=SLOW)]
)
def test_a_job_ends_at_once_and_keeps_its_last_snapshot(start, tmp_path, fashion, how, workers):
    """Its ranks end, their loaders' workers, and those that wait in an all-reduce. The shell lets a
    job with an ampersand ignore SIGINT, which torch sends the ranks of a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = start(*SPAWN2, 999, "--num-workers", workers, *fashion(200, 10))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job.wait_for(r"Epoch 1 \| Batchsize: ")
    os.kill(job.process.pid, signal.Signals[how])
    status, said = {"SIGKILL": (-signal.SIGKILL, ""), "SIGTERM": (-2, "KeyboardInterrupt")}[how]
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


def test_an_exception_of_rank_1_is_in_the_report_of_torchrun(run, fashion):
    text = run(TORCHRUN.format(2), 9, *fashion(100, 10), status=1, LADDER_RAISE="1:5")
    _, _, report = text.partition("Root Cause (first")
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
