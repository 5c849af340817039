"""ddp_torchrun.py under torchrun: launching, restarts, failures, mixed precision, compilation."""

import os
import random
import re
import shutil
import signal
import time

import pytest
from helpers.files import difference, load, same_bytes
from helpers.hosts import require
from helpers.jobs import TORCHRUN, epochs, losses

RESTARTS = "torchrun --standalone --nproc_per_node=2 --max-restarts=3 ddp_torchrun.py"
# Without it, most restarts on torchrun's own rendezvous store fail; README says so.
SHARED_STORE_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}


@pytest.mark.slow("five launches of real command lines")
def test_ways_of_launching(run, tmp_path, fashion):
    options = (1, *fashion(200, 10))
    launches = [
        "torchrun --nproc_per_node=2 ddp_torchrun.py",
        TORCHRUN.format(2),
        "python -m torch.distributed.run --standalone --nproc-per-node 2 ddp_torchrun.py",
        "python -m torch.distributed.launch --standalone --nproc_per_node=2 ddp_torchrun.py",
    ]
    env = {"LADDER_DTYPE": "float64"}
    snapshots = []
    for launch in launches:
        text = run(launch, *options, **env)
        assert "[rank 0 of 2] " in text and "[rank 1 of 2] " in text and len(epochs(text)) == 1
        assert text.count("Steps: 4\n") == 2 and text.count("Total time: ") == 1
        snapshots.append(load(tmp_path / "checkpoint.pt"))
    assert all(same_bytes(snapshot, snapshots[0]) for snapshot in snapshots)
    text = run("ddp_torchrun.py", *options, "--batch-size", 64, **env)  # for a debugger
    assert "[rank 0 of 1] " in text and text.count("Steps: 4\n") == 1
    assert difference(load(tmp_path / "checkpoint.pt"), snapshots[0]) < 1e-12


def kill(job, rank: int) -> None:
    os.kill(job.workers()[rank], signal.SIGKILL)


def test_a_restart_goes_on_from_the_last_snapshot(start, tmp_path, whole):
    options, _, expected = whole((TORCHRUN.format(2),))
    job = start(RESTARTS, *options, "--resume", **SHARED_STORE_OFF)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    kill(job, 0)
    text = job.finish()
    assert text.count("No snapshot at ") == 1
    assert text.count("Resuming training from snapshot at Epoch 1\n") == 1
    assert [line["epoch"] for line in epochs(text)] == [0, 1]
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)


def test_restarts_without_resume_are_refused(run, tmp_path):
    """Or a restart would train anew, over the snapshot."""
    text = run(RESTARTS.replace("=3", "=1"), 1, status=1, **SHARED_STORE_OFF)
    line = "error: torchrun's --max-restarts goes with --resume, or a restart would begin anew\n"
    assert text.count(line) == text.count(": error: ") == 1  # not at each restart
    assert "[rank " not in text and not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(n, marks=pytest.mark.slow("more moments")) for n in range(1, 10))],
)
def test_killed_at_a_random_moment(start, tmp_path, whole, seed):
    options, _, expected = whole((TORCHRUN.format(2),))
    draw = random.Random(seed)
    rank, seconds = draw.randrange(2), draw.uniform(0, 4)
    print(f"seed {seed}: kill rank {rank} after {seconds:.2f} s")
    job = start(RESTARTS, *options, "--resume", **SHARED_STORE_OFF)
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(job.workers()) < 2:
        assert job.process.poll() is None, "done before it was killed: draw shorter times"
        time.sleep(0.02)
    kill(job, rank)
    text = job.finish()
    assert text.count("total_epochs: ") == 2 or text.count("[rank 0 of 2]") < 2, text
    assert load(tmp_path / "checkpoint.pt")["epoch"] == 2
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)


def test_workers_stop_when_torchrun_is_killed(fork, start, tmp_path, whole):
    options, _, expected = whole((TORCHRUN.format(2),))
    job = start(TORCHRUN.format(2), *options)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    os.kill(job.process.pid, signal.SIGKILL)
    text = job.finish(-signal.SIGKILL)
    assert "Epoch 1 | Stopped at sample" in text
    fork(TORCHRUN.format(2), *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), expected)


@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.slow("8 s; rank 1 is the harder one")), 1]
)
def test_an_exception_of_any_rank_is_torchruns_root_cause(run, fashion, rank):
    text = run(TORCHRUN.format(2), 2, *fashion(1000, 10), status=1, LADDER_RAISE=f"{rank}:5")
    report = text.split("Root Cause (first observed failure):")[1]
    assert f"rank      : {rank} (local_rank: {rank})" in report
    assert "ArithmeticError: the test's own error" in report
    assert re.search(r'ddp_torchrun.py", line \d+, in _run_batch', report)
    assert text.count("ArithmeticError: the test's own error") == 2  # its traceback, and torchrun's
    assert not epochs(text)


def test_a_rank_that_hangs(start, fashion):
    options = (50, *fashion(1000, 10), "--timeout", 8, "--log-interval", 1)
    job = start(TORCHRUN.format(2), *options)
    job.wait_for("Step 3 ")
    stopped = job.workers()[1]
    os.kill(stopped, signal.SIGSTOP)
    job.wait_for(r"\[rank0\].*Timed out waiting 8000ms", 30)
    os.kill(stopped, signal.SIGCONT)  # torchrun would wait 30 s for it before it kills it
    job.finish(1, seconds=60)


def test_only_the_first_process_of_a_host_prepares_the_data(fork):
    """The download fails: one process has tried it, and the others end with it."""
    proxies = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    text = fork(TORCHRUN.format(3), 1, "--dataset", "mnist", status=1, **proxies)
    lines = [line for line in text.splitlines() if line.startswith("error: cannot download MNIST")]
    assert len(lines) == 1 and "--dataset digits" in lines[0], text


def test_damaged_data(run, tmp_path, fashion):
    arguments = fashion(500, 10)
    os.truncate(tmp_path / "fashion/FashionMNIST/raw/train-images-idx3-ubyte", 1_000)
    text = run(TORCHRUN.format(2), 1, *arguments, status=1)
    (line,) = re.findall("^error: .*", text, re.M)
    assert line.startswith(f"error: FashionMNIST in {arguments[-1]} is damaged or incomplete")


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        ((), {"LADDER_FAKE_GPUS": 2}, "3 processes are more than 2 devices"),
        (("--sync-bn",), {}, "--sync-bn needs an accelerator: leave it out on a CPU"),
        (("--bach-size", 8), {}, "unrecognized arguments: --bach-size 8"),
    ],
)
def test_what_all_processes_see_one_says(fork, tmp_path, arguments, env, message):
    text = fork(TORCHRUN.format(3), 1, *arguments, status=1, **env)
    assert text.count(f"ddp_torchrun.py: error: {message}") == text.count(": error: ") == 1, text
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.slow("six epochs of all digits")
def test_bf16_is_as_accurate_within_a_point(fork, tmp_path):
    last, train_losses = {}, {}
    for amp in ("off", "bf16"):
        lines = epochs(fork(TORCHRUN.format(2), 3, "--amp", amp))
        train_losses[amp] = [line["train_loss"] for line in lines]
        assert train_losses[amp][0] > train_losses[amp][2]
        last[amp] = lines[2]
    assert train_losses["off"] != train_losses["bf16"]
    assert last["off"]["accuracy"] > 97
    assert abs(last["off"]["accuracy"] - last["bf16"]["accuracy"]) < 1, last
    weights = load(tmp_path / "checkpoint.pt")["model"].values()
    assert all("float32" in str(weight.dtype) for weight in weights)


def test_fp16_scales_the_loss_and_resumes_the_scaler(fork, tmp_path, fashion):
    options = (*fashion(256, 10), "--amp", "fp16")
    whole = fork(TORCHRUN.format(2), 2, *options, "--snapshot-path", "whole.pt")
    assert epochs(whole)[1]["train_loss"] < epochs(whole)[0]["train_loss"]
    fork(TORCHRUN.format(2), 1, *options)
    first = load(tmp_path / "checkpoint.pt")["scaler"]
    assert first["scale"] > 1 and 0 < first["_growth_tracker"] <= 4  # steps without an overflow
    fork(TORCHRUN.format(2), 2, *options, "--resume")
    second, expected = load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")
    assert second["scaler"] == expected["scaler"] != first
    assert same_bytes(second, expected)


@pytest.mark.slow("compiles twice")
def test_compile_gives_the_same_losses_and_clean_snapshots(run, tmp_path, fashion):
    """In double precision. A laptop without a C++ compiler skips this; CI has one."""
    require(None if shutil.which("g++") else "no C++ compiler")
    options = (2, *fashion(150, 10), "--log-interval", 1)
    env = {"LADDER_DTYPE": "float64"}
    expected = losses(run(TORCHRUN.format(2), *options, "--snapshot-path", "eager.pt", **env))
    text = run(TORCHRUN.format(2), *options, "--compile", TORCH_LOGS="graph_code", **env)
    assert len(losses(text)) == 6 and losses(text) == pytest.approx(expected, abs=1e-6)
    assert "TRACED GRAPH" in text  # something was compiled
    compiled, eager = load(tmp_path / "checkpoint.pt"), load(tmp_path / "eager.pt")
    assert list(compiled["model"]) == list(eager["model"])
    assert difference(compiled, eager) < 1e-10
