"""Stopped in any way, resumed by any rung: as if nothing had happened."""

import os
import re
import shutil
import signal
import time
from collections import Counter

import pytest
from helpers.files import difference, load, same_bytes
from helpers.jobs import ALONE, TORCHRUN, Job, epochs

SINGLE, PARALLEL = ("single_gpu.py",), ("data_parallel.py",)
SPAWN2 = ("ddp_spawn.py", "--nproc-per-node", 2)
NODE2 = ("multinode.py", *ALONE, "--nproc-per-node", 2)
TORCHRUN2, TORCHRUN3 = (TORCHRUN.format(2),), (TORCHRUN.format(3),)
STOPPED = "stopped: --resume goes on from the last snapshot"
OTHER = pytest.mark.slow("other receivers of the same signals; real command lines")


# The ConvNet has dropout: its masks are the same only if they are seeded as before.
# With three or more processes the order of summation matters; see _settle_buckets.
@pytest.mark.parametrize(
    ("launch", "model"),
    [
        (SINGLE, "convnet"),
        (PARALLEL, "convnet"),
        (SPAWN2, "convnet"),
        (NODE2, "convnet"),
        (TORCHRUN2, "convnet"),
        ((TORCHRUN.format(4),), "mlp"),
    ],
)
def test_stopped_after_an_epoch(fork, tmp_path, fashion, launch, model):
    options = (*launch[1:], *fashion(400, 10), "--model", model)
    whole = fork(launch[0], 3, *options, "--snapshot-path", "whole.pt")
    parts = fork(launch[0], 1, *options) + fork(launch[0], 3, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    assert [{**line, "rate": 0} for line in epochs(parts)] == [
        {**line, "rate": 0} for line in epochs(whole)
    ]
    assert "Resuming training from snapshot at Epoch 1\n" in parts
    if launch == SINGLE:  # there is nothing left to do
        assert epochs(fork(launch[0], 3, *options, "--resume")) == []


def send(job: Job, how: str) -> int:
    """Ask the job to stop; the exit status of a job that torchrun has not started."""
    pid = job.process.pid
    signum = signal.SIGTERM if "TERM" in how else signal.SIGINT
    if how == "Ctrl-C":
        os.killpg(pid, signum)
    elif how == "Ctrl-C, twice":
        os.killpg(pid, signum)
        os.killpg(pid, signum)
    elif how == "SIGTERM to all":
        for each in job.pids():
            os.kill(each, signum)
    else:
        os.kill(pid, signum)
    return 128 + signum


@pytest.mark.parametrize(
    ("launch", "how", "forked"),
    [
        (SINGLE, "SIGTERM to the parent", True),
        (SINGLE, "Ctrl-C", False),
        (PARALLEL, "SIGTERM to the parent", True),
        (PARALLEL, "Ctrl-C, twice", True),
        (SPAWN2, "SIGTERM to the parent", True),
        (SPAWN2, "SIGTERM to all", True),
        (SPAWN2, "SIGINT to the parent", True),
        (SPAWN2, "Ctrl-C, twice", True),
        (SPAWN2, "Ctrl-C", False),
        (NODE2, "SIGTERM to the parent", True),
        (NODE2, "SIGTERM to all", True),
        (NODE2, "Ctrl-C", False),
    ],
)
def test_a_job_ends_at_once_and_resumes_from_its_last_snapshot(
    fork, start, tmp_path, whole, launch, how, forked
):
    options, _, expected = whole(launch)
    job = start(launch[0], *options, fork=forked)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    text = job.finish(send(job, how), seconds=15)
    assert text.count(STOPPED) == 1 and "Traceback" not in text, text
    assert len(epochs(text)) == 1 and "Total time" not in text, text
    assert not [line for line in text.splitlines() if not ordinary(line)], text
    snapshot = load(tmp_path / "checkpoint.pt")
    assert snapshot["epoch"] == 1 and not same_bytes(snapshot, expected)
    text = fork(launch[0], *options, "--resume")
    assert "Resuming training from snapshot at Epoch 1\n" in text
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)


def ordinary(line: str) -> bool:
    return line == STOPPED or bool(re.match(r"total_epochs: |\[rank |\[CPU|Epoch ", line))


@pytest.mark.parametrize(
    ("launch", "how", "workers"),
    [
        (TORCHRUN2, "SIGTERM to the parent", 0),
        pytest.param(TORCHRUN2, "Ctrl-C", 0, marks=OTHER),
        (TORCHRUN3, "Ctrl-C", 0),
        (TORCHRUN2, "SIGTERM to all", 2),
        (("ddp_torchrun.py",), "Ctrl-C", 1),
    ],
)
def test_ddp_torchrun_stops_in_mid_epoch_and_goes_on_from_there(
    fork, start, tmp_path, whole, launch, how, workers
):
    options, whole_text, expected = whole(launch)
    job = start(launch[0], *options, "--num-workers", workers)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    status = send(job, how)
    # torchrun has only 1, and none if a signal finds it at Python's end.
    text = job.finish(status if launch == ("ddp_torchrun.py",) else None, seconds=30)
    assert job.process.returncode != 0, text
    (seen,) = re.findall(r"^Epoch 1 \| Stopped at sample (\d+), saved$", text, re.M)
    # torchrun shows a traceback of its own
    assert 'ddp_torchrun.py", line' not in text and "DataLoader worker" not in text, text
    snapshot = load(tmp_path / "checkpoint.pt")
    assert snapshot["epoch"] == 1 and 0 < snapshot["samples_seen"] == int(seen) < 4_000
    assert not same_bytes(snapshot, expected)
    text = fork(launch[0], *options, "--resume")
    assert "Resuming training from snapshot at Epoch 1\n" in text
    assert 4_000 - int(seen) >= 32 * text.count("Epoch 1 | Step ") > 0
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)
    # The resumed epoch's line is about the whole epoch, too. (A sum of losses in another order.)
    ours, theirs = epochs(text)[-1], epochs(whole_text)[-1]
    assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=2e-4)
    assert (ours["test_loss"], ours["correct"]) == (theirs["test_loss"], theirs["correct"])


def test_ranks_that_hear_of_the_stop_at_different_steps_agree(start, tmp_path, fashion):
    """Rank 0 has passed the end of step 10 when the signal comes, and rank 1 has not."""
    options = (*fashion(4_000, 10), "--log-interval", 9)
    job = start(TORCHRUN2[0], 1, *options, LADDER_SLOW=1)
    job.wait_for(r"Step 9 ")
    time.sleep(0.15)
    os.kill(job.process.pid, signal.SIGTERM)
    assert "Stopped at sample" in job.finish(1)
    assert load(tmp_path / "checkpoint.pt")["samples_seen"] in (630, 1260)  # 10 or 20 steps of 63


@pytest.mark.parametrize("launch", [SPAWN2, NODE2])
@pytest.mark.parametrize(
    "victim",
    ["parent", pytest.param("rank 0", marks=pytest.mark.slow("rank 1 is enough")), "rank 1"],
)
def test_killed_processes_take_the_job_with_them(fork, start, tmp_path, whole, launch, victim):
    options, _, expected = whole(launch)
    job = start(launch[0], *options)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    pids = {"parent": job.process.pid}
    pids["rank 0"], pids["rank 1"] = job.workers()
    os.kill(pids[victim], signal.SIGKILL)
    text = job.finish(-signal.SIGKILL if victim == "parent" else 1, seconds=30)
    if victim != "parent":
        last = text.splitlines()[-1]
        assert last.startswith(f"error: process {victim[-1]} terminated with signal SIGKILL"), text
        assert last.endswith(": --resume goes on from the last snapshot")
    assert "Traceback" not in text and len(epochs(text)) == 1, text  # epoch 1 was not ended
    fork(launch[0], *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)


def test_a_killed_torchrun_leaves_nobody(fork, start, tmp_path, whole):
    options, _, expected = whole(TORCHRUN2)
    job = start(TORCHRUN2[0], *options)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish(-signal.SIGKILL, seconds=30)
    assert load(tmp_path / "checkpoint.pt")["samples_seen"] > 0
    fork(TORCHRUN2[0], *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)


@pytest.mark.parametrize("launch", [SINGLE, PARALLEL])
def test_kill_of_one_process(fork, start, tmp_path, whole, launch):
    options, _, expected = whole(launch)
    job = start(launch[0], *options, fork=True)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    os.kill(job.process.pid, signal.SIGKILL)
    job.finish(-signal.SIGKILL)
    fork(launch[0], *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C", "SIGKILL of rank 0"])
def test_no_loader_worker_is_left(start, fashion, how):
    job = start(*SPAWN2, 50, *fashion(1_000, 10), "--num-workers", 2, "--log-interval", 1)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    if how == "SIGKILL of rank 0":
        os.kill(job.workers()[0], signal.SIGKILL)
        job.finish(1, seconds=20)
    else:
        job.finish(send(job, how), seconds=20)


@pytest.mark.parametrize("launch", [SINGLE, PARALLEL, SPAWN2, NODE2, TORCHRUN2])
def test_killed_while_it_writes_a_snapshot(fork, start, tmp_path, fashion, launch):
    options = (*launch[1:], *fashion(200, 10))
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


def test_any_rung_goes_on_from_any_other_at_any_world_size(fork, tmp_path, fashion):
    """Each leg of an epoch has another rung or number of processes."""
    data, env = fashion(1_000, 10), {"LADDER_DTYPE": "float64"}
    for epoch, (script, *options) in enumerate(
        [
            ("ddp_spawn.py", "--nproc-per-node", 2, "--batch-size", 6),
            ("single_gpu.py", "--batch-size", 12),
            (TORCHRUN.format(3), "--batch-size", 2, "--accumulate", 2),
            ("data_parallel.py", "--batch-size", 12),
            (*NODE2, "--batch-size", 6),
            ("single_gpu.py", "--batch-size", 12),
        ]
    ):
        text = fork(script, epoch + 1, *data, *options, "--resume", **env)
        assert [line["epoch"] for line in epochs(text)] == [epoch]
        assert "The global batch is another" not in text
    options = ("--batch-size", 12, "--snapshot-path", "whole.pt")
    fork("single_gpu.py", 6, *data, *options, **env)
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) < 1e-12


def test_a_stop_in_mid_epoch_goes_on_at_any_world_size(fork, start, tmp_path, fashion):
    trace = tmp_path / "trace"
    data = (*fashion(2_400, 10), "--log-interval", 1)
    trace.mkdir()
    env = {"LADDER_DTYPE": "float64", "LADDER_TRACE": trace}
    legs = [(TORCHRUN.format(2), 6), ("ddp_torchrun.py", 12), (TORCHRUN.format(3), 4)]
    for number, (launch, size) in enumerate(legs):
        job = start(launch, 1, *data, "--batch-size", size, "--resume", **env)
        if number < 2:
            job.wait_for(r"Epoch 0 \| Step 3 ")
            os.kill(job.process.pid, signal.SIGTERM)
            job.finish(1 if "torchrun " in launch else 143)
        else:
            job.finish()
        shutil.copy(tmp_path / "checkpoint.pt", tmp_path / f"leg{number}.pt")
    seen = [load(tmp_path / f"leg{number}.pt")["samples_seen"] for number in range(2)]
    assert 0 < seen[0] < seen[1] < 2_400
    trained = Counter()
    for path in trace.iterdir():
        for line in path.read_text().splitlines():
            count, *indices = map(int, line.split())
            if count == 2_400:
                trained.update(indices)
    assert trained == Counter(range(2_400))  # none repeated, none lost
    options = ("--batch-size", 12, "--snapshot-path", "whole.pt")
    fork("single_gpu.py", 1, *data, *options, LADDER_DTYPE="float64")
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) < 1e-12


def test_a_snapshot_holds_what_the_design_says(fork, tmp_path, fashion):
    keys = {"model", "optimizer", "schedule", "epoch", "global_batch", "args"}
    for launch, more in ((SPAWN2, set()), (TORCHRUN2, {"scaler", "samples_seen", "loss_sum"})):
        fork(*launch, 1, *fashion(100, 10), "--model", "resnet18", "--batch-size", 25)
        snapshot = load(tmp_path / "checkpoint.pt")
        assert snapshot.keys() == keys | more
        assert not [name for name in snapshot["model"] if re.match(r"module\.|_orig_mod\.", name)]
        assert (snapshot["epoch"], snapshot["global_batch"]) == (1, 50)
        assert snapshot["args"]["model"] == "resnet18" and snapshot["optimizer"]["state"]
