"""What is no mistake of the user's: the first error is seen, all processes end, nothing is left.

Processes that are killed in training: test_resume.py; under torchrun: test_torchrun.py.
"""

import os
import signal
import time

import pytest
from helpers.jobs import ALONE, TORCHRUN, epochs

SPAWN2 = ("ddp_spawn.py", "--nproc-per-node", 2)
NODE2 = ("multinode.py", *ALONE, "--world-size", 2, "--nproc-per-node", 2)
STOPPED = "\nstopped: --resume goes on from the last snapshot\n"
KILLED = "\nerror: process 0 terminated with signal SIGKILL\n"
slow = pytest.mark.slow("mp.spawn and torchrun wait 30 seconds before they kill")
again = pytest.mark.slow("the same in another script")


@pytest.fixture
def temporary(tmp_path):
    """A folder for TMPDIR, in which a job must leave nothing of its own. (torch leaves folders.)"""
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield folder
    assert not [*folder.glob("tmp*")]


@pytest.mark.parametrize(("launch", "rank"), [(SPAWN2, 1), pytest.param(NODE2, 0, marks=again)])
def test_an_exception_of_any_rank(run, fashion, launch, rank):
    """With its traceback, and not with that of a rank which has lost it."""
    text = run(*launch, 9, *fashion(100, 10), status=1, LADDER_RAISE=f"{rank}:5")
    assert f"-- Process {rank} terminated with the following error:" in text
    assert "in _run_batch" in text and "ArithmeticError: the test's own error" in text
    assert "Connection closed" not in text and "Epoch 3 " not in text


@pytest.mark.parametrize(
    ("launch", "ends"),
    [
        (SPAWN2, 3),
        (("ddp_torchrun.py",), 1),
        pytest.param(NODE2, 3, marks=again),
    ],
)
def test_what_is_registered_for_the_end_is_run(run, temporary, fashion, launch, ends):
    """By each rank, and by their parent, because experiment trackers upload then what they have."""
    text = run(*launch, 1, *fashion(100, 10), LADDER_ATEXIT=1, TMPDIR=temporary)
    assert text.count("\nPython ends: ") == ends and "Total time: " in text, text


def test_ctrl_c_while_processes_start(start, temporary, fashion):
    job = start(*SPAWN2, 50, *fashion(100, 10), TMPDIR=temporary)
    while len(job.workers()) < 2:
        assert job.process.poll() is None, job.text
        time.sleep(0.01)
    os.killpg(job.process.pid, signal.SIGINT)
    text = job.finish(130, seconds=60)  # a process that imports torch may show where it was
    assert STOPPED in text and not epochs(text), text


def test_ctrl_c_while_another_node_is_missing(start, tmp_path):
    options = ("--init-method", f"file://{tmp_path}/store", "--rank", 0, "--world-size", 2)
    job = start("multinode.py", *options)
    job.wait_for(r"^rank 0 waits for all 2 at file://\S+store, up to 600 s$")
    while not (tmp_path / "store").exists():  # which its process makes
        time.sleep(0.01)
    os.killpg(job.process.pid, signal.SIGINT)
    text = job.finish(130, seconds=10)
    assert text.endswith(STOPPED) and "error" not in text and "Traceback" not in text, text


@pytest.mark.parametrize(
    ("launch", "whom", "signum", "status", "seconds"),
    [
        (SPAWN2, "parent", signal.SIGINT, 130, 15),
        pytest.param(NODE2, "parent", signal.SIGTERM, 143, 15, marks=again),
        pytest.param(SPAWN2, "rank 0", signal.SIGKILL, 1, 35, marks=slow),
        pytest.param((TORCHRUN.format(2),), "parent", signal.SIGTERM, 1, 35, marks=slow),
        pytest.param((TORCHRUN.format(2),), "rank 0", signal.SIGKILL, 1, 35, marks=slow),
    ],
)
def test_a_stop_or_a_death_while_another_rank_hangs(
    start, fashion, launch, whom, signum, status, seconds
):
    """The others wait for it in an all-reduce, for --timeout, 600 seconds."""
    options = (50, *fashion(1000, 10), "--log-interval", 1)
    job = start(*launch, *options)
    job.wait_for("Step 3 ")
    first, hanging = job.workers()
    os.kill(hanging, signal.SIGSTOP)
    time.sleep(1)
    os.kill(job.process.pid if whom == "parent" else first, signum)
    text = job.finish(status, seconds=seconds)
    if "torchrun" not in launch[0]:
        assert text.endswith(STOPPED if whom == "parent" else KILLED), text
