"""Ctrl-C, SIGTERM, an error or the death of a process ends the whole job, and nobody is left.

Two scripts leave that to Python and two end their ranks; ddp_torchrun.py saves first. Restarts:
test_torchrun.py.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import time

import pytest
import torch
from helpers.files import load, same_bytes
from helpers.jobs import NODE2, SPAWN2, TORCHRUN, Job, command
from helpers.ranks import train

STOPPED = "stopped: --resume goes on from the last snapshot"
KILLED = "error: process {} terminated with signal SIGKILL"
ORDINARY = r"total_epochs: |rank 0 waits |\[rank |\[CPU|Epoch |W\d+ .*Terminating process"


def end(job: Job, how: str) -> tuple[int, list[str]]:
    """The status that the job ends with then, and what it says."""
    pid = job.process.pid
    python = job.command[1].endswith(("single_gpu.py", "data_parallel.py"))
    if how == "SIGKILL of rank 1":
        os.kill(job.workers()[1], signal.SIGKILL)
        return 1, [KILLED.format(1)]
    if how == "SIGKILL of the parent":
        os.kill(pid, signal.SIGKILL)
        return -signal.SIGKILL, []
    if how == "SIGTERM to all":
        for each in job.pids():
            with contextlib.suppress(ProcessLookupError):  # the parent may have ended it by now
                os.kill(each, signal.SIGTERM)
    elif how == "SIGTERM":
        os.kill(pid, signal.SIGTERM)
    else:
        os.killpg(pid, signal.SIGINT)
        return (-signal.SIGINT, ["KeyboardInterrupt"]) if python else (130, [STOPPED])
    return (-signal.SIGTERM, []) if python else (143, [STOPPED])


slow = pytest.mark.slow("the same in another script, or in another way")


@pytest.mark.parametrize(
    ("launch", "how"),
    [
        (("single_gpu.py",), "SIGTERM"),
        (("data_parallel.py",), "Ctrl-C"),
        (SPAWN2, "Ctrl-C"),
        (SPAWN2, "SIGTERM"),
        (SPAWN2, "SIGKILL of the parent"),
        ((*SPAWN2, "--num-workers", 1), "SIGKILL of rank 1"),
        (NODE2, "SIGTERM to all"),
        (NODE2, "SIGKILL of rank 1"),
    ],
)
def test_a_job_ends_at_once_and_keeps_its_last_snapshot(start, tmp_path, fashion, launch, how):
    script, *options = launch
    job = start(script, 999, *options, *fashion(200, 10), "--log-interval", 1)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    status, said = end(job, how)
    text = job.finish(status, seconds=30)
    own = [line for line in text.splitlines() if not re.match(ORDINARY, line)]
    assert own[-1:] == said if "KeyboardInterrupt" in said else own == said, text
    # It may have been saved, and not yet said.
    assert load(tmp_path / "checkpoint.pt")["epoch"] - text.count("checkpoint saved") in (0, 1)


@pytest.mark.parametrize(
    "how", ["SIGTERM to all", "SIGKILL of the parent", pytest.param("Ctrl-C", marks=slow)]
)
def test_torchruns_workers_save_in_mid_epoch(start, tmp_path, fashion, how):
    """The loader's workers go on until then. (Status 1 is torchrun's.)"""
    options = (1, *fashion(400, 10), "--batch-size", 8, "--log-interval", 1)
    train(tmp_path, "ddp_torchrun.py", 2, *options, "--snapshot-path", "whole.pt")
    job = start(TORCHRUN.format(2), *options, "--num-workers", 1, LADDER_SLOW=0)
    job.wait_for(r"Epoch 0 \| Step 7 ")
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
    train(tmp_path, "ddp_torchrun.py", 2, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), whole)


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [(1, "0"), pytest.param(99, "0:4", marks=slow)],
)
def test_a_stop_is_heard_in_short_epochs_and_between_long_steps(
    start, tmp_path, fashion, steps, seconds
):
    """Only the last rank hears it. torchrun kills all after 30 seconds."""
    data = fashion(16 * steps, 10)
    job = start(TORCHRUN.format(2), 999, *data, "--batch-size", 8, LADDER_SLOW=seconds)
    job.wait_for("Epoch 3 " if steps < 3 else "Epoch 0 ")
    time.sleep(0 if steps < 3 else 5)
    os.kill(job.workers()[-1], signal.SIGTERM)
    (seen,) = re.findall(r"Stopped at sample (\d+), saved\n", job.finish(1, seconds=25))
    assert load(tmp_path / "checkpoint.pt")["samples_seen"] == int(seen) < 16 * steps


def test_the_ranks_ask_each_other_at_every_tenth_step_or_at_each_slow_one(make, monkeypatch):
    """Ten slow ones may take longer than torchrun waits for a stop. A GPU's steps have only begun
    when the question comes, so it waits for them first."""
    _, trainer = make("ddp_torchrun.py", "--batch-size", 2)
    steps, passed = iter((0, 0.5, 9, 11, 2)), [0.0]  # seconds
    monkeypatch.setattr(time, "perf_counter", lambda: sum(passed))
    monkeypatch.setattr(torch.Tensor, "item", lambda _: passed.append(next(steps)))
    trainer.asked_at, trainer.interval = 0.0, 1
    for step, then in ((1, 2), (2, 12), (12, 22), (22, 23), (23, 24)):
        trainer._agree_on_stopping(step)
        assert trainer.ask_at_step == then and not trainer.stopping


@pytest.fixture
def temporary(tmp_path):
    """A folder for TMPDIR, in which a job must leave nothing of its own. (torch leaves folders.)"""
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield folder
    assert not [*folder.glob("tmp*")]


@pytest.mark.parametrize(("launch", "rank"), [(SPAWN2, 1), pytest.param(NODE2, 0, marks=slow)])
def test_an_exception_of_any_rank(run, fashion, launch, rank):
    """With its traceback, and not with that of a rank which has lost it."""
    text = run(*launch, 9, *fashion(100, 10), status=1, LADDER_RAISE=f"{rank}:5")
    assert f"-- Process {rank} terminated with the following error:" in text
    assert "in _run_batch" in text and "ArithmeticError: the test's own error" in text
    assert "Connection closed" not in text and "Epoch 3 " not in text


@pytest.mark.parametrize(
    ("launch", "ends"),
    [(SPAWN2, 3), (("ddp_torchrun.py",), 1)],
)
def test_what_is_registered_for_the_end_is_run(run, temporary, fashion, launch, ends):
    """By each rank, and by their parent, because experiment trackers upload then what they have."""
    text = run(*launch, 1, *fashion(100, 10), LADDER_ATEXIT=1, TMPDIR=temporary)
    assert text.count("Python ends: ") == ends and "Total time: " in text, text
    # A rank whose group is held has threads of gloo's, one of which may abort it at that moment.
    assert not re.search("Python ends: .*gloo", text), text


@pytest.mark.parametrize(
    ("launch", "how"),
    [
        (SPAWN2, "Ctrl-C"),
        ((TORCHRUN.format(1), "--timeout", 1), "SIGKILL of the parent"),
    ],
)
def test_an_end_while_the_processes_start(start, tmp_path, fashion, launch, how):
    """They end where they would have begun, and not after 999 epochs."""
    script, *options = launch
    job = start(script, 999, *options, *fashion(100, 10), TMPDIR=tmp_path)
    while len(job.workers()) < (1 if "torchrun" in script else 2):  # so rank 0 knows its work
        assert job.process.poll() is None, job.text
        time.sleep(0.01)
    status, said = end(job, how)
    late = time.monotonic() + 60  # they import torch first
    while job.pids() and "Epoch " not in job.text and time.monotonic() < late:
        time.sleep(0.05)
    text = job.finish(status)  # a process that imports torch may show where it was
    assert all(line in text for line in said) and "Epoch " not in text, text
    assert how == "SIGKILL of the parent" or not [*tmp_path.glob("tmp*")]


@pytest.mark.slow("several starts")
@pytest.mark.parametrize("seed", range(int(os.environ.get("STARTS", 3))))
def test_nobody_is_left_after_a_signal_at_any_moment(start, fashion, seed):
    """Also after several ones, in any order, with a millisecond or less between them."""
    draw, both = random.Random(seed), (signal.SIGTERM, signal.SIGINT)
    job = start(SPAWN2[0], 999, *SPAWN2[1:], *fashion(100, 10))
    if seed % 3:  # else the signal comes while it imports torch
        job.wait_for("total_epochs: ")
    time.sleep(draw.uniform(0, 4))
    begun = "total_epochs: " in job.text
    for signum in (both[seed % 2], *draw.choices(both, k=draw.randint(0, 2))):
        (os.killpg if draw.random() < 0.5 else os.kill)(job.process.pid, signum)
        time.sleep(draw.uniform(0, 0.001))
    text = job.finish(None, seconds=20)
    assert job.process.returncode in ((130, 143) if begun else (130, 143, -2, -15, 1)), text


def test_the_snapshot_of_a_stop_is_saved_whatever_reads_the_output(tmp_path, fashion):
    """As when Ctrl-C has ended `| tee log` first."""
    words = command("ddp_torchrun.py", 999, *fashion(400, 10), "--log-interval", 1)
    job = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while b"Step 3 " not in job.stdout.readline():
            assert job.poll() is None
        job.stdout.close()
        time.sleep(0.1)  # it prints, and nobody reads
        job.send_signal(signal.SIGINT)
        error = job.stderr.read()
        job.wait(30)
    finally:
        job.kill()
    assert b"Traceback" not in error, error
    assert (tmp_path / "checkpoint.pt").exists()


def test_ctrl_c_while_another_node_is_missing(start, tmp_path):
    options = ("--init-method", f"file://{tmp_path}/store", "--rank", 0, "--world-size", 2)
    job = start("multinode.py", *options)
    job.wait_for(r"^rank 0 waits for all 2 at file://\S+store, up to 600 s$")
    while not (tmp_path / "store").exists():  # which its process makes
        time.sleep(0.01)
    os.killpg(job.process.pid, signal.SIGINT)
    text = job.finish(130, seconds=10)
    assert text.endswith(f"{STOPPED}\n") and "error" not in text and "Traceback" not in text, text


@pytest.mark.parametrize(
    ("launch", "whom", "signum", "status"),
    [
        (SPAWN2, "parent", signal.SIGINT, 130),
        pytest.param(SPAWN2, "rank 0", signal.SIGKILL, 1, marks=slow),
        pytest.param((TORCHRUN.format(2),), "parent", signal.SIGTERM, 1, marks=slow),
        pytest.param((TORCHRUN.format(2),), "rank 0", signal.SIGKILL, 1, marks=slow),
    ],
)
def test_a_stop_or_a_death_while_another_rank_hangs(start, fashion, launch, whom, signum, status):
    """The others wait for it in an all-reduce, for --timeout, 600 seconds."""
    options = (50, *fashion(1000, 10), "--log-interval", 1)
    job = start(*launch, *options)
    job.wait_for("Step 3 ")
    first, hanging = job.workers()
    os.kill(hanging, signal.SIGSTOP)
    time.sleep(1)
    os.kill(job.process.pid if whom == "parent" else first, signum)
    text = job.finish(status, seconds=25 if signum == signal.SIGINT else 60)  # torch waits for 30
    if "torchrun" not in launch[0]:
        said = STOPPED if whom == "parent" else KILLED.format(0)
        assert text.endswith(f"\n{said}\n"), text
