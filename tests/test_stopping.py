"""A signal, an error or the death of a process ends the whole job, and nobody is left.

The last snapshot stays whole. What a resumed job makes of it: test_faults.py, test_resume.py.
Restarts: test_torchrun.py.
"""

import contextlib
import os
import random
import re
import signal
import sys
import time

import pytest
from helpers.files import load
from helpers.jobs import NODE2, ROOT, SPAWN2, TORCHRUN, Job

TWO = (TORCHRUN.format(2),)
SLOW = pytest.mark.slow("the same, with another launcher")


def end(job: Job, how: str) -> tuple[int, str]:
    """The status that the job ends with then, and the last line that it prints, if any."""
    pid, torchrun = job.process.pid, "torchrun" in job.command[0]
    if how == "SIGKILL of rank 1":
        os.kill(job.workers()[1], signal.SIGKILL)
        return 1, "=====" if torchrun else "error: process 1 terminated with signal SIGKILL"
    if how == "SIGKILL of the parent":
        os.kill(pid, signal.SIGKILL)
        return -signal.SIGKILL, ""
    if how == "Ctrl-C":
        os.killpg(pid, signal.SIGINT)
    else:
        for each in job.pids() if how == "SIGTERM to all" else [pid]:
            with contextlib.suppress(ProcessLookupError):  # the parent may have ended it by now
                os.kill(each, signal.SIGTERM)
    return (1, "SignalException: Process") if torchrun else (-2, "KeyboardInterrupt")


@pytest.mark.parametrize(
    ("launch", "how"),
    [
        (SPAWN2, "Ctrl-C"),
        (SPAWN2, "SIGTERM"),
        (SPAWN2, "SIGKILL of the parent"),
        ((*SPAWN2, "--num-workers", 1), "SIGKILL of rank 1"),
        (NODE2, "SIGTERM to all"),
        (TWO, "SIGTERM"),
        pytest.param((*TWO, "--num-workers", 1), "SIGKILL of rank 1", marks=SLOW),
    ],
)
def test_a_job_ends_at_once_and_keeps_its_last_snapshot(start, tmp_path, fashion, launch, how):
    """Ranks, and their loaders' workers, also while the others wait in an all-reduce."""
    script, *options = launch
    job = start(script, 999, *options, *fashion(200, 10), "--log-interval", 1)
    job.wait_for(r"Epoch 1 \| Step ")
    status, said = end(job, how)
    text = job.finish(status, seconds=30)
    # But for Python's warning of semaphores that killed processes have left.
    lines = [line for line in text.splitlines() if not re.search("resource_tracker|warn", line)]
    assert said in lines[-1], text
    # It may have been saved, and not yet said.
    assert load(tmp_path / "checkpoint.pt")["epoch"] - text.count("checkpoint saved") in (0, 1)


LOADER = """
import os
from torch.utils.data import DataLoader
from common.loader import loader_options

if __name__ == "__main__":
    data = [bytes(200_000)] * 1000  # more than a pipe holds
    options = loader_options("cpu", 1) | {"collate_fn": list}
    batches = iter(DataLoader(data, batch_size=4, **options))
    next(batches)
    os.kill(os.getpid(), 9)
"""


def test_a_worker_that_hands_over_a_batch_ends_with_its_rank(tmp_path):
    (tmp_path / "train.py").write_text(LOADER)
    job = Job([sys.executable, "train.py"], tmp_path, {"PYTHONPATH": str(ROOT)})
    job.finish(-signal.SIGKILL)


def test_an_exception_of_any_rank(run, fashion):
    """With its traceback, and not with that of a rank which has lost it."""
    text = run(*SPAWN2, 9, *fashion(100, 10), status=1, LADDER_RAISE="1:5")
    assert "-- Process 1 terminated with the following error:" in text
    assert "in train_epoch" in text and "ArithmeticError: the test's own error" in text
    assert "Connection closed" not in text and "Epoch 3 " not in text


@pytest.mark.parametrize("launch", [SPAWN2, pytest.param(TWO, marks=SLOW)])
def test_what_is_registered_for_the_end_is_run(run, tmp_path, fashion, launch):
    """By each rank, and by their parent, because experiment trackers upload then what they have."""
    text = run(*launch, 1, *fashion(100, 10), LADDER_ATEXIT=1, TMPDIR=tmp_path)
    assert text.count("Python ends: ") == 3 and "Total time: " in text, text
    # A rank whose group is held has threads of gloo's, one of which may abort it at that moment.
    assert not re.search("Python ends: .*gloo", text), text
    assert not [*tmp_path.glob("tmp*")]  # the ranks of ddp_spawn.py have met there


@pytest.mark.slow("several starts")
@pytest.mark.parametrize("seed", range(int(os.environ.get("STARTS", 3))))
def test_nobody_is_left_after_a_signal_at_any_moment(start, tmp_path, fashion, seed):
    """Also after a second one, and while the ranks import torch. (torch's folders stay.)"""
    draw, both = random.Random(seed), (signal.SIGTERM, signal.SIGINT)
    job = start(SPAWN2[0], 999, *SPAWN2[1:], *fashion(100, 10), TMPDIR=tmp_path)
    if seed % 3:  # else the signal comes while the parent imports torch
        job.wait_for("total_epochs: ")
    time.sleep(draw.uniform(0, 6))
    for signum in (both[seed % 2], *draw.choices(both, k=draw.randint(0, 1))):
        if job.process.poll() is None:
            (os.killpg if draw.random() < 0.5 else os.kill)(job.process.pid, signum)
        time.sleep(draw.uniform(0.05, 0.5))  # as fast as a finger
    text = job.finish(None, seconds=20)
    # 1: a rank was signalled, too, or Python was importing the tests' site module.
    assert job.process.returncode in (-2, -15, 1), text
    assert not [*tmp_path.glob("tmp*")], text


def test_ctrl_c_while_another_node_is_missing(start, tmp_path):
    options = ("--init-method", f"file://{tmp_path}/store", "--rank", 0, "--world-size", 2)
    job = start("multinode.py", *options)
    job.wait_for(r"^waiting for all 2 ranks at file://\S+store, up to 600 s$")
    while not (tmp_path / "store").exists():  # which its process makes
        time.sleep(0.01)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.finish(-2, seconds=10).endswith("\nKeyboardInterrupt\n")


def test_a_stop_while_another_rank_hangs(start, fashion):
    """The others wait for it in an all-reduce, for --timeout, 600 seconds."""
    job = start(*SPAWN2, 50, *fashion(1000, 10), "--log-interval", 1)
    job.wait_for("Step 3 ")
    os.kill(job.workers()[1], signal.SIGSTOP)
    time.sleep(1)
    os.kill(job.process.pid, signal.SIGINT)
    job.finish(-2, seconds=25)
