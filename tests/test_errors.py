"""What a user can get wrong, and what can go wrong: one line, a status, no damage, no orphans."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.files import idx_files
from helpers.jobs import ALONE, LAUNCHES, ROOT, SCRIPTS, TORCHRUN, epochs, refusal

USAGE = [
    ((0,), "argument total_epochs: 0 is less than 1"),
    ((5, -1), "argument save_every: -1 is less than 1"),
    (("five",), "argument total_epochs: invalid number value: 'five'"),
    (("--batch-size", 0), "--batch_size: 0 is less than 1"),
    (("--batch_size", "1.5"), "invalid number value: '1.5'"),
    (("--test-batch-size", 0), "argument --test-batch-size: 0 is less than 1"),
    (("--lr", "nan"), "argument --lr: nan is less than 0.0"),
    (("--lr", "fast"), "argument --lr: invalid number value: 'fast'"),
    (("--momentum", -0.1), "argument --momentum: -0.1 is less than 0.0"),
    (("--seed", -1), "argument --seed: -1 is less than 0"),
    (("--log-interval", -1), "argument --log-interval: -1 is less than 0"),
    (("--dataset", "imagenet"), "invalid choice: 'imagenet'"),
    (("--model", "gpt"), "invalid choice: 'gpt'"),
    (("--device", "tpu"), "invalid choice: 'tpu'"),
    (("--device", "cuda"), "invalid choice: 'cuda'"),  # there is none here
    (("--snapshot-path", "missing/x.pt"), "--snapshot-path missing/x.pt: name a file in a folder"),
    (("--snapshot-path", "."), "--snapshot-path .: name a file in a folder that you may write to"),
    (("--learning-rate", 1), "unrecognized arguments: --learning-rate"),
]
DDP = [
    (("--timeout", 0), "argument --timeout: 0 is less than 1"),
    (("--backend", "nccl"), "--backend nccl does not work on cpu here: leave it out"),
    (("--backend", "carrier-pigeon"), "--backend carrier-pigeon does not work on cpu here"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_usage(refuse, arguments, message):
    assert message in refuse("single_gpu.py", *arguments)


@pytest.mark.parametrize("script", SCRIPTS[2:])
@pytest.mark.parametrize(("arguments", "message"), DDP)
def test_usage_of_ddp(refuse, script, arguments, message):
    options = ALONE if script == "multinode.py" else ()
    assert message in refuse(script, *options, *arguments)


def test_usage_of_ddp_torchrun(refuse, monkeypatch):
    message = "--sync-bn needs an accelerator: leave it out on a CPU"
    assert refuse("ddp_torchrun.py", "--sync-bn") == message
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert "--max-restarts goes with --resume" in refuse("ddp_torchrun.py")


@pytest.mark.parametrize("launch", LAUNCHES)
def test_usage_on_the_real_command_line(run, tmp_path, launch):
    text = run(*launch, "--lr", "-1", status=2)
    assert refusal(text, launch[0], tmp_path) == "argument --lr: -1 is less than 0.0"


def test_usage_under_torchrun(run):
    """Said once, by the first process."""
    text = run(TORCHRUN.format(3), "--lr", "-1", status=1)
    assert text.count("error: argument --lr: -1 is less than 0.0") == 1
    assert text.count("usage: ") == 1


def test_more_processes_than_devices(fork, tmp_path):
    text = fork("ddp_spawn.py", "--nproc-per-node", 3, status=2, LADDER_FAKE_GPUS=2)
    assert "3 processes are more than 2 devices" in refusal(text, "ddp_spawn.py", tmp_path)


def error_line(text: str) -> str:
    """The only line that is not an ordinary one, or torch's about a rank that it ends."""
    ordinary = r"total_epochs: |\[rank |\[CPU|Epoch |No snapshot|W\d+ .*Terminating process"
    (line,) = [line for line in text.splitlines() if not re.match(ordinary, line)]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    "launch", [("single_gpu.py",), ("ddp_spawn.py",), ("multinode.py", *ALONE), TORCHRUN]
)
def test_a_snapshot_of_another_model(run, fork, tmp_path, fashion, launch):
    """More of what does not fit: in test_snapshots.py. Really started: no line more than that."""
    fork("single_gpu.py", 1, *fashion(100, 10))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    words = (launch.format(2),) if launch == TORCHRUN else launch
    text = run(*words, 2, *fashion(100, 10), "--model", "convnet", "--resume", status=1)
    line = "error: checkpoint.pt was made with --model mlp, and this run has convnet"
    if launch == TORCHRUN:  # which reports it, too
        assert text.splitlines().count(line) == 1 and "Traceback" not in text.split(line)[0]
    else:
        assert error_line(text) == line
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_no_snapshot_to_resume_from_is_no_error(fork, fashion):
    text = fork("ddp_spawn.py", 1, *fashion(100, 10), "--resume")
    assert "No snapshot at checkpoint.pt" in text and len(epochs(text)) == 1


# Nothing answers there: a download fails at once, also on a machine that has a network.
NO_NETWORK = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_download_fails(fork, dataset):
    text = fork("ddp_spawn.py", 1, "--dataset", dataset, status=1, **NO_NETWORK)
    line = error_line(text)
    assert "cannot download" in line and "--dataset digits" in line, line


def test_damaged_files(fork, tmp_path):
    raw = idx_files(tmp_path / "data", 100, 10) / "FashionMNIST" / "raw"
    whole = (raw / "train-images-idx3-ubyte").read_bytes()
    for damage in (whole[:5000], b"", whole[:16] + whole[16 : 16 + 784 * 99]):
        (raw / "train-images-idx3-ubyte").write_bytes(damage)
        text = fork("single_gpu.py", 1, "--dataset", "fashion-mnist", status=1)
        assert "FashionMNIST in data is damaged or incomplete" in error_line(text)
        assert "delete it" in error_line(text)


@pytest.mark.parametrize("launch", [("multinode.py", *ALONE, "--nproc-per-node", 2), TORCHRUN])
def test_damaged_files_in_a_child_process(run, tmp_path, launch):
    """Rank 0 says so. The other one may say that rank 0 is gone."""
    raw = idx_files(tmp_path / "data", 100, 10) / "FashionMNIST" / "raw"
    (raw / "train-images-idx3-ubyte").write_bytes(b"")
    words = (launch.format(2),) if launch == TORCHRUN else launch
    text = run(*words, 1, "--dataset", "fashion-mnist", status=1)
    damaged = "error: FashionMNIST in data is damaged or incomplete"
    assert len(re.findall(f"^{damaged}", text, re.M)) == 1, text
    assert "Traceback" not in text.split(damaged)[0]


def test_a_missing_file_that_cannot_be_downloaded(fork, tmp_path):
    raw = idx_files(tmp_path / "data", 100, 10) / "FashionMNIST" / "raw"
    (raw / "t10k-labels-idx1-ubyte").unlink()
    text = fork("single_gpu.py", 1, "--dataset", "fashion-mnist", status=1, **NO_NETWORK)
    assert "cannot download FashionMNIST to data" in error_line(text)


def test_data_folder_that_cannot_be_written(fork, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file/data", "/proc/data"):
        options = ("--dataset", "mnist", "--data-dir", folder)
        line = error_line(fork("ddp_spawn.py", 1, *options, status=1))
        assert f"cannot use the data folder {folder}" in line and "--data-dir" in line


@pytest.mark.parametrize(
    "body",
    [
        'raise RuntimeError("operator torchvision::nms does not exist")',
        "raise ModuleNotFoundError(\"No module named 'torchvision'\")",
    ],
)
@pytest.mark.parametrize("options", [("--dataset", "mnist"), ("--model", "resnet18")])
def test_torchvision_that_does_not_match_torch(run, tmp_path, body, options):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(body)
    line = error_line(run("single_gpu.py", 1, *options, status=1, PYTHONPATH=tmp_path))
    assert f"torchvision does not work with torch {torch.__version__}" in line
    assert "pip install --upgrade torch torchvision" in line


@pytest.mark.parametrize("script", ["single_gpu.py", "ddp_spawn.py"])
def test_disk_full_while_saving(fork, tmp_path, fashion, script):
    """A file-size limit stands in for the full disk; the old snapshot stays whole."""
    options = fashion(100, 10)
    fork(script, 1, *options)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    limit = 2**20  # the data fit, the MLP's 5 MB do not
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *options, "2", "--resume"],
        cwd=tmp_path,
        capture_output=True,
        timeout=180,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    text = (done.stdout + done.stderr).decode()
    assert done.returncode == 1 and "OSError: [Errno 27] File too large" in text, text
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not (tmp_path / "checkpoint.pt.tmp").exists()


@pytest.mark.parametrize(
    "launch",
    [
        ("ddp_spawn.py",),
        (TORCHRUN.format(2),),
        ("multinode.py", *ALONE, "--nproc-per-node", 2),
    ],
)
def test_what_is_registered_for_the_end_is_run(run, fashion, launch):
    """By each rank once, and by their parent: experiment trackers upload what they have then.

    No thread of gloo's is left by then: one in some hundred processes aborted or hung with it.
    """
    text = run(*launch, *fashion(100, 10), LADDER_ATEXIT=1)
    ends = re.findall("^Python ends: (.*)", text, re.M)
    assert len(ends) == 3 and "gloo" not in "".join(ends) and "Total time: " in text, text


@pytest.mark.parametrize("launch", [("ddp_spawn.py",), ("multinode.py", *ALONE)])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_of_any_rank_reaches_the_user(fork, fashion, launch, rank):
    options = ("--nproc-per-node", 2, *fashion(1000, 10))
    text = fork(*launch, 2, *options, status=1, LADDER_RAISE=f"{rank}:5")
    assert f"-- Process {rank} terminated with the following error:" in text
    assert "ArithmeticError: the test's own error" in text
    assert "in _run_batch" in text and "Connection closed" not in text


def test_a_rank_that_never_joins(start, fashion):
    began = time.monotonic()
    job = start("ddp_spawn.py", 1, *fashion(100, 10), fork=True, LADDER_DIE=1)
    job.finish(3, seconds=40)
    assert time.monotonic() - began < 40


def test_a_rank_that_hangs(start, fashion):
    options = ("--timeout", 3, "--log-interval", 1)
    job = start("ddp_spawn.py", 50, *fashion(1000, 10), *options, fork=True)
    job.wait_for("Step 3 ")
    os.kill(job.workers()[1], signal.SIGSTOP)
    text = job.finish(1, seconds=60)
    assert "Process 0 terminated with the following error" in text
    assert re.search("imed out|timeout", text), text


@pytest.mark.parametrize("moment", ["total_epochs", r"\[rank 0"])
def test_ctrl_c_before_training(start, fashion, moment):
    """While the parent loads the data, and while the processes meet."""
    job = start("ddp_spawn.py", 50, *fashion(100_000, 10))
    job.wait_for(moment)
    os.killpg(job.process.pid, signal.SIGINT)
    text = job.finish(130, seconds=60)
    assert text.count("stopped: ") == 1 and "Traceback" not in text and not epochs(text), text


@pytest.mark.parametrize("launch", [("ddp_spawn.py",), ("multinode.py", *ALONE)])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_while_a_rank_hangs(start, fashion, launch, signum):
    """The other one waits for it in an all-reduce, for --timeout, 600 seconds."""
    options = ("--nproc-per-node", 2, *fashion(1000, 10), "--log-interval", 1)
    job = start(*launch, 50, *options, fork=True)
    job.wait_for("Step 3 ")
    os.kill(job.workers()[1], signal.SIGSTOP)
    time.sleep(1)
    os.killpg(job.process.pid, signum)
    text = job.finish(128 + signum, seconds=15)
    assert text.endswith("\nstopped: --resume goes on from the last snapshot\n")


def test_two_runs_at_once(start, tmp_path, fashion):
    data, jobs = fashion(1000, 10), []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        jobs.append(start("ddp_spawn.py", 2, *data, folder=tmp_path / str(number), fork=True))
    first, second = (epochs(job.finish()) for job in jobs)
    assert len(first) == 2
    assert [line["train_loss"] for line in first] == [line["train_loss"] for line in second]


@pytest.mark.parametrize("launch", ["ddp_spawn.py", "ddp_torchrun.py"])
def test_nothing_listens_beyond_loopback(start, fashion, launch):
    job = start(launch, 50, *fashion(1000, 10), "--log-interval", 1, fork=True)
    job.wait_for("Step 3 ")
    sockets = set()
    for pid in job.pids():
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                sockets.add(found[1])
    listening = []
    for name, loopback in (("tcp", "0100007F"), ("tcp6", "0" * 24 + "01000000")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                listening.append(fields[1].split(":")[0] == loopback)
    assert listening and all(listening)
