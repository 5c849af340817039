"""The scripts train: on the generated digits, on MNIST, and on files shaped like the others."""

import os
import pickle
import pty
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.files import load
from helpers.jobs import ALONE, LAUNCHES, ROOT, SCRIPTS, SITE, TORCHRUN, epochs
from helpers.parts import CPU

from common.model import build_model
from common.seed import set_seed

THREADS = torch.get_num_threads()  # other tests change it, in this process


@pytest.mark.parametrize(
    "script",  # for the others see their own tests
    [
        "single_gpu.py",
        pytest.param(
            "data_parallel.py", marks=pytest.mark.slow("9 s; shorter runs of it are quick")
        ),
        "ddp_spawn.py",
    ],
)
def test_loss_falls_accuracy_rises_and_weights_move(fork, tmp_path, script):
    text = fork(script, 3)
    lines = epochs(text)
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert lines[0]["train_loss"] > lines[1]["train_loss"] > lines[2]["train_loss"] > 0
    assert lines[0]["accuracy"] < lines[2]["accuracy"] and lines[2]["accuracy"] > 97
    assert all(line["total"] == 2000 and line["rate"] > 0 for line in lines)
    assert all(line["accuracy"] == pytest.approx(line["correct"] / 20) for line in lines)
    set_seed(CPU, 42)
    first = build_model("convnet", (1, 28, 28)).state_dict()
    last = load(tmp_path / "checkpoint.pt")["model"]
    assert all((first[name] != last[name]).any() for name in first)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_printed_lines(run, fashion, launch):
    text = run(*launch, 2, 1, *fashion(100, 10), "--batch-size", 8, OMP_NUM_THREADS="")
    world_size = 2 if launch[0] == "ddp_spawn.py" else 1
    steps = 7 if world_size == 2 else 13
    lines = text.splitlines()
    # Under torchrun the ranks' own lines come first.
    assert "total_epochs: 2, save_every: 1, batch_size: 8" in lines[: 1 + world_size]
    assert re.fullmatch(r"Total time: \d+\.\d{3}s", lines[-1])
    for rank in range(world_size):
        for epoch in range(2):
            assert f"[CPU{rank}] Epoch {epoch} | Batchsize: 8 | Steps: {steps}" in lines
        if launch[0] not in SCRIPTS[:2]:
            threads = max(1, THREADS // world_size)
            where = f"device cpu | backend gloo | threads {threads}"
            assert f"[rank {rank} of {world_size}] {where}" in lines
    assert "Epoch 1 | Training checkpoint saved at checkpoint.pt" in lines
    others = 0 if launch[0] in SCRIPTS[:2] else world_size  # one a rank
    assert len(epochs(text)) == 2 and len(lines) == 6 + 2 * world_size + others


@pytest.fixture
def mnist(tmp_path):
    """The official gz files, for torchvision to verify and unpack."""
    source = Path(os.environ.get("MNIST_DIR", ROOT.parent / "shared" / "data"))
    if not (source / "MNIST" / "raw").is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"no MNIST files in {source}")
        pytest.skip("set MNIST_DIR to a folder that has MNIST/raw with the four official gz files")
    shutil.copytree(source / "MNIST" / "raw", tmp_path / "data" / "MNIST" / "raw")


@pytest.mark.slow("180,000 images")
def test_mnist_passes_98_5_percent_in_three_epochs(fork, mnist):
    lines = epochs(fork("ddp_spawn.py", 3, "--dataset", "mnist"))
    assert len(lines) == 3 and lines[-1]["total"] == 10_000
    assert max(line["accuracy"] for line in lines) > 98.5, lines


def test_fashion_mnist_shaped_files_train_the_mlp(fork, tmp_path, fashion):
    lines = epochs(fork("ddp_spawn.py", 3, *fashion(1000, 100)))
    assert lines[-1]["train_loss"] < lines[0]["train_loss"] and lines[-1]["accuracy"] > 50
    assert load(tmp_path / "checkpoint.pt")["args"]["model"] == "mlp"


def cifar_files(folder: Path) -> None:
    """600 images in torchvision's format, each class in a colour of its own."""
    base = folder / "cifar-10-batches-py"
    base.mkdir(parents=True)
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 200, (10, 3, 1))
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels = rng.integers(0, 10, 100)
        data = colours[labels] + rng.integers(0, 55, (100, 3, 1024))
        entry = {"data": data.reshape(100, 3072).astype("u1"), "labels": labels.tolist()}
        (base / name).write_bytes(pickle.dumps(entry))
    meta = {"label_names": [str(i) for i in range(10)]}
    (base / "batches.meta").write_bytes(pickle.dumps(meta))


@pytest.mark.parametrize(
    ("model", "lr"),
    [
        ("lenet", 0.01),
        # At 0.01 its loss goes up and down, because BatchNorm sees ten samples at a time.
        pytest.param("resnet18", 0.002, marks=pytest.mark.slow("ResNet-18 on a CPU")),
    ],
)
def test_cifar10_shaped_files_train(fork, tmp_path, model, lr):
    cifar_files(tmp_path / "data")
    options = ("--dataset", "cifar10", "--model", model, "--batch-size", 10, "--lr", lr)
    lines = epochs(fork("ddp_spawn.py", 3, *options, LADDER_MD5="skip"))
    assert lines[0]["total"] == 100
    assert lines[-1]["train_loss"] < lines[0]["train_loss"] and lines[-1]["accuracy"] > 20


@pytest.mark.parametrize("script", [*SCRIPTS[:3], TORCHRUN.format(2)])
def test_batchnorm_is_evaluated_with_the_statistics_that_are_saved(fork, tmp_path, fashion, script):
    """Ranks have statistics of their own; with an odd test set, a mix of them would show."""
    options = ("--model", "resnet18", "--batch-size", 16)
    (line,) = epochs(fork(script, 1, *fashion(96, 9), *options, LADDER_DTYPE="float64"))
    from common.data import load_dataset

    _, test_set = load_dataset("fashion-mnist", str(tmp_path / "fashion"))
    model = build_model("resnet18", (1, 28, 28)).double()
    model.load_state_dict(load(tmp_path / "checkpoint.pt")["model"])
    source, targets = test_set.__getitems__(range(9))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model.eval()(source.double()), targets)
    assert line["test_loss"] == pytest.approx(loss.item(), abs=6e-5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copy_of_a_script_and_common_runs_from_anywhere(tmp_path, fashion, script):
    alone = [str(word) for word in ALONE] if script == "multinode.py" else []
    alone = [word.replace("file://new", f"file://{tmp_path}/store") for word in alone]
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir(), elsewhere.mkdir()
    shutil.copy(ROOT / script, project)
    shutil.copytree(ROOT / "common", project / "common")
    command = [sys.executable, str(project / script), "1", *fashion(100, 10), *alone]
    env = {**os.environ, "PYTHONPATH": str(SITE)}  # nothing of the repository's root
    done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert len(epochs(done.stdout.decode())) == 1 and not done.stderr
    assert [path.name for path in elsewhere.iterdir()] == ["checkpoint.pt"]


def test_tensorboard_files(fork, tmp_path, fashion):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    text = fork(TORCHRUN.format(2), 2, *fashion(100, 10), "--log-dir", "runs")
    assert len(list((tmp_path / "runs").iterdir())) == 1  # rank 0 alone
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    for tag, name in {"loss/train": "train_loss", "loss/test": "test_loss"}.items():
        values = [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]
        assert values == [(line["epoch"], line[name]) for line in epochs(text)]
    assert len(events.Scalars("accuracy")) == 2


def test_progress_bar_on_a_terminal(tmp_path, fashion):
    """On no other stderr: test_printed_lines. Who has a bar: test_output.py."""
    command = [sys.executable, str(ROOT / "single_gpu.py"), "1", *fashion(600, 10)]
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    with subprocess.Popen(
        [*command, "--batch-size", "1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=terminal,
        stdout=subprocess.PIPE,
    ) as process:
        os.close(terminal)
        chunks = []
        while True:
            try:
                chunks.append(os.read(master, 4096))
            except OSError:  # the last process has closed the terminal
                break
        assert len(epochs(process.stdout.read().decode())) == 1
    os.close(master)
    assert "/600 [" in b"".join(chunks).decode()


def test_a_machine_with_gpus_runs_this_on_the_cpu(run, fork, fashion):
    """Every test not marked gpu: by whatever it starts its jobs, and here."""
    env = {"LADDER_MACHINE": 2}  # it looks as if this machine had two
    text = run("single_gpu.py", "--help", **env, LADDER_CPU="")
    assert "--device {cuda,cpu}" in text  # what would be found
    for script in SCRIPTS[:3]:
        start = run if script == "ddp_spawn.py" else fork
        text = start(script, 1, *fashion(50, 10), **env)
        assert "[CPU0] Epoch 0 |" in text
    argv = [sys.executable, "-c", "import torch; print(torch.accelerator.is_available())"]
    done = subprocess.run(argv, env={**os.environ, "LADDER_MACHINE": "2"}, capture_output=True)
    assert done.stdout.strip() == b"False"
    assert torch.accelerator.current_accelerator(check_available=True) is None


def test_omp_num_threads_is_obeyed(run, fashion):
    text = run("ddp_spawn.py", 1, *fashion(50, 10), OMP_NUM_THREADS=2)
    assert text.count(" | threads 2\n") == 2


def test_memory_of_the_images_is_shared(start, fashion):
    """100 MB of images show in each process's memory as shared, and count once."""
    job = start("ddp_spawn.py", 1, *fashion(130_000, 10), "--log-interval", 1)
    job.wait_for(r"Step 2 ")
    smaps = [Path(f"/proc/{pid}/maps").read_text() for pid in (job.process.pid, *job.workers())]
    inodes = [set(re.findall(r" (\d+) +/(?:dev/shm|memfd:?)\S*torch_", text)) for text in smaps]
    sizes = [
        max(
            int(end, 16) - int(begin, 16)
            for begin, end in re.findall(r"^(\w+)-(\w+) .*torch_", text, re.M)
        )
        for text in smaps
    ]
    assert len(smaps) == 3 and min(sizes) > 100e6
    assert set.intersection(*inodes)
    job.kill()
