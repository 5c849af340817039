"""Stopped in any way, resumed by any rung: as if nothing had happened."""

import os
import re
import shutil
import signal
import time
from collections import Counter

import pytest
import torch
from helpers.files import difference, load, same_bytes
from helpers.jobs import TORCHRUN, epochs

QUIET = ("--no-progress", "--log-interval", 1)
SPAWN2 = ("ddp_spawn.py", "--nproc-per-node", 2)
TORCHRUN2 = (TORCHRUN.format(2),)
OTHER = pytest.mark.slow("other receivers of the same signals; real command lines")


# The ConvNet has dropout: its masks are the same only if every rank's RNG state is restored.
# With four processes the order of summation matters; see _settle_buckets in ddp_spawn.py.
@pytest.mark.parametrize(
    ("launch", "model"),
    [
        (("single_gpu.py",), "convnet"),
        (("data_parallel.py",), "convnet"),
        (SPAWN2, "convnet"),
        (("ddp_spawn.py", "--nproc-per-node", 4), "mlp"),
        (TORCHRUN2, "convnet"),
    ],
)
def test_stopped_after_an_epoch(fork, tmp_path, fashion, launch, model):
    options = (*launch[1:], *fashion(400, 10), "--model", model, "--no-progress")
    whole = fork(launch[0], 3, *options, "--snapshot-path", "whole.pt")
    parts = fork(launch[0], 1, *options) + fork(launch[0], 3, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    assert [{**line, "rate": 0} for line in epochs(parts)] == [
        {**line, "rate": 0} for line in epochs(whole)
    ]
    assert "Resuming training from snapshot at Epoch 1, sample 0" in parts
    if launch == ("single_gpu.py",):  # there is nothing left to do
        assert epochs(fork(launch[0], 3, *options, "--resume")) == []


def send(job, how: str) -> int | None:
    """Ask the job to stop; the exit status that shells give to it (None: not sure). torchrun
    has only 1, and none if the second signal finds it at Python's end."""
    pid = job.process.pid
    if how == "SIGTERM to the parent":
        os.kill(pid, signal.SIGTERM)
    elif how == "SIGTERM to all":
        os.killpg(pid, signal.SIGTERM)
    elif how == "Ctrl-C":
        os.killpg(pid, signal.SIGINT)
    elif how == "SIGINT to the parent":
        os.kill(pid, signal.SIGINT)
    elif how == "SIGTERM to rank 1":
        os.kill(job.workers()[1], signal.SIGTERM)
    elif how == "SIGTERM to all, twice":
        os.killpg(pid, signal.SIGTERM)
        time.sleep(0.2)
        os.killpg(pid, signal.SIGTERM)
        return None
    if "torchrun" in job.process.args[0]:
        return 1
    return 128 + (signal.SIGTERM if "TERM" in how else signal.SIGINT)


@pytest.mark.parametrize(
    ("launch", "how"),
    [
        (("single_gpu.py",), "SIGTERM to the parent"),
        (("single_gpu.py",), "Ctrl-C"),
        (("data_parallel.py",), "SIGTERM to the parent"),
        (SPAWN2, "SIGTERM to the parent"),
        pytest.param(SPAWN2, "SIGTERM to all", marks=OTHER),
        pytest.param(SPAWN2, "SIGTERM to rank 1", marks=OTHER),
        pytest.param(SPAWN2, "SIGINT to the parent", marks=OTHER),
        (SPAWN2, "Ctrl-C"),
        (TORCHRUN2, "SIGTERM to the parent"),
        pytest.param(TORCHRUN2, "SIGTERM to all, twice", marks=OTHER),
        pytest.param(TORCHRUN2, "SIGTERM to rank 1", marks=OTHER),
        (TORCHRUN2, "Ctrl-C"),
    ],
)
def test_asked_to_stop_in_the_middle_of_an_epoch(fork, start, tmp_path, whole, launch, how):
    options, whole_text, expected = whole(launch)
    job = start(launch[0], *options)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    text = job.finish(send(job, how))
    assert job.process.returncode != 0, text
    stopped = re.search(r"^Epoch 1 \| Stopped at sample (\d+), saved at checkpoint.pt$", text, re.M)
    script = launch[0].split()[-1]  # torchrun shows a traceback of its own
    assert stopped and f'{script}", line' not in text and "Total time" not in text, text
    snapshot = load(tmp_path / "checkpoint.pt")
    assert snapshot["epoch"] == 1 and 0 < snapshot["samples_seen"] == int(stopped[1]) < 4_000
    assert not same_bytes(snapshot, expected)
    if how not in ("SIGTERM to the parent", "Ctrl-C"):  # the same code saves
        return
    text = fork(launch[0], *options, "--resume")
    assert f"Resuming training from snapshot at Epoch 1, sample {stopped[1]}" in text
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)
    # The resumed epoch's line is about the whole epoch, too. (A sum of losses in another order.)
    ours, theirs = epochs(text)[-1], epochs(whole_text)[-1]
    assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=2e-4)
    assert (ours["test_loss"], ours["correct"]) == (theirs["test_loss"], theirs["correct"])


def test_ranks_that_hear_of_the_stop_at_different_steps_agree(start, tmp_path, fashion):
    """Rank 0 has passed the end of step 10 when the signal comes, and rank 1 has not."""
    options = (*SPAWN2[1:], *fashion(4_000, 10), "--no-progress", "--log-interval", 9)
    job = start("ddp_spawn.py", 1, *options, fork=True, LADDER_SLOW=1)
    job.wait_for(r"Step 9 ")
    time.sleep(0.15)
    os.kill(job.process.pid, signal.SIGTERM)
    assert "Stopped at sample" in job.finish(128 + signal.SIGTERM)
    assert load(tmp_path / "checkpoint.pt")["samples_seen"] in (630, 1260)  # 10 or 20 steps of 63


@pytest.mark.parametrize(
    "victim",
    [
        "parent",
        pytest.param("parent, not on Linux", marks=pytest.mark.slow("as on a Mac")),
        pytest.param("rank 0", marks=pytest.mark.slow("10 s; rank 1 is quick")),
        "rank 1",
    ],
)
def test_killed_processes_take_the_job_with_them(fork, start, tmp_path, whole, victim):
    options, _, expected = whole(SPAWN2)
    victim, _, elsewhere = victim.partition(", ")
    job = start("ddp_spawn.py", *options, LADDER_PRCTL="off" if elsewhere else "")
    job.wait_for(r"Epoch 1 \| Step 3 ")
    pids = {"parent": job.process.pid}
    pids["rank 0"], pids["rank 1"] = job.workers()
    os.kill(pids[victim], signal.SIGKILL)
    text = job.finish(-signal.SIGKILL if victim == "parent" else 1, seconds=30)
    if victim != "parent":
        last = text.splitlines()[-1]
        assert last.startswith(f"error: process {victim[-1]} terminated with signal SIGKILL"), text
    assert "Traceback" not in text and len(epochs(text)) == 1, text  # epoch 1 was not ended
    fork("ddp_spawn.py", *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)


def test_kill_of_single_gpu(fork, start, tmp_path, whole):
    options, _, expected = whole(("single_gpu.py",))
    job = start("single_gpu.py", *options, fork=True)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish(-signal.SIGKILL)
    fork("single_gpu.py", *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)


@pytest.mark.parametrize("launch", [("single_gpu.py",), SPAWN2])
def test_killed_while_it_writes_a_snapshot(fork, start, tmp_path, fashion, launch):
    options = (*launch[1:], *fashion(200, 10), "--no-progress")
    fork(launch[0], 1, *options)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    job = start(launch[0], 2, *options, "--resume", fork=True, LADDER_HANG=600)
    job.wait_for("in fsync")
    assert (tmp_path / "checkpoint.pt.tmp").stat().st_size > 0
    os.killpg(job.process.pid, signal.SIGKILL)
    job.finish(-signal.SIGKILL)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    fork(launch[0], 2, *options, "--resume")
    fork(launch[0], 2, *options, "--snapshot-path", "whole.pt")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    assert not (tmp_path / "checkpoint.pt.tmp").exists()


def test_nobody_leaves_while_rank_0_saves(start, tmp_path, fashion):
    """The parent would take the first one's end for a failure, and kill rank 0 after 5 seconds."""
    options = (*SPAWN2[1:], *fashion(4_000, 10), *QUIET)
    job = start("ddp_spawn.py", 50, *options, fork=True, LADDER_HANG=11)
    job.wait_for(r"Step 3 ")
    text = job.finish(send(job, "SIGTERM to all"))
    assert "in fsync" in text and "Stopped at sample" in text
    assert "[rank 1] still waiting for rank 0, which saves the snapshot\n" in text
    assert load(tmp_path / "checkpoint.pt")["samples_seen"] > 0


def test_any_rung_goes_on_from_any_other_at_any_world_size(fork, start, tmp_path, fashion):
    """Stopped in mid-epoch three times; every leg has another rung or number of processes."""
    trace = tmp_path / "trace"
    data = (*fashion(6_000, 10), *QUIET)
    legs = [
        ("ddp_spawn.py", "--nproc-per-node", 2, "--batch-size", 6),
        ("single_gpu.py", "--batch-size", 12),
        ("ddp_spawn.py", "--nproc-per-node", 3, "--batch-size", 4),
        ("data_parallel.py", "--batch-size", 12),
    ]
    trace.mkdir()
    env = {"LADDER_DTYPE": "float64", "LADDER_TRACE": trace}
    for number, (script, *options) in enumerate(legs):
        job = start(script, 1, *data, *options, "--resume", fork=True, **env)
        if number < 3:
            job.wait_for(r"Epoch 0 \| Step 3 ")
            os.kill(job.process.pid, signal.SIGTERM)
            job.finish(128 + signal.SIGTERM)
        else:
            job.finish()
        shutil.copy(tmp_path / "checkpoint.pt", tmp_path / f"leg{number}.pt")
    seen = [load(tmp_path / f"leg{number}.pt")["samples_seen"] for number in range(3)]
    assert 0 < seen[0] < seen[1] < seen[2] < 6_000
    trained = Counter()
    for path in trace.iterdir():
        for line in path.read_text().splitlines():
            count, *indices = map(int, line.split())
            if count == 6_000:
                trained.update(indices)
    assert trained == Counter(range(6_000))  # none repeated, none lost
    fork(
        "single_gpu.py",
        1,
        *data,
        "--batch-size",
        12,
        "--snapshot-path",
        "whole.pt",
        LADDER_DTYPE="float64",
    )
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) < 1e-12


def test_a_snapshot_holds_what_the_design_says(fork, tmp_path, fashion):
    fork("ddp_spawn.py", 1, *fashion(100, 10), "--model", "resnet18", "--batch-size", 25)
    snapshot = load(tmp_path / "checkpoint.pt")
    assert not [name for name in snapshot["model"] if name.startswith(("module.", "_orig_mod."))]
    assert snapshot["epoch"] == 1 and snapshot["samples_seen"] == 0
    first, second = (state["cpu"] for state in snapshot["rng_states"])
    assert not torch.equal(first, second)  # each rank drops out other units
    assert snapshot["settings"]["model"] == "resnet18"
    assert snapshot["optimizer"]["state"] and snapshot["scaler"] == {}
