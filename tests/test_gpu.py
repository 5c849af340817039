"""On GPUs: pytest -m gpu. One CUDA device stands for two, a rank each, by LADDER_TWIN.

REHEARSE=1 pytest -m gpu tests/test_gpu.py      the same on a CPU: do the tests themselves work?
"""

import os
import re
import time

import pytest
import torch
from helpers.files import difference, idx_files, load, same_bytes
from helpers.jobs import TORCHRUN, Job, command, epochs

count = torch.cuda.device_count()
TWIN = {"LADDER_TWIN": "1"} if count == 1 else {}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),  # one after the other: each takes all devices
    pytest.mark.skipif(not count and not os.environ.get("REHEARSE"), reason="no GPU here"),
]
LONG = TORCHRUN.replace("ddp_torchrun.py", "recipes/long_run.py").format(2)


@pytest.fixture
def trained(tmp_path):
    """trained(launch, name, *options) -> the snapshot, and what is printed.

    The global batch is 32, and the last one of an epoch has two samples.
    """
    data = ("--dataset", "fashion-mnist", "--data-dir", idx_files(tmp_path, 26 * 32 + 2, 10))

    def trained(launch: str, name: str, *options: object, total: int = 2, **env: str) -> tuple:
        batch = ("--batch-size", 16 if "torchrun" in launch else 32)
        words = command(launch, total, *data, *batch, "--snapshot-path", f"{name}.pt", *options)
        text = Job(words, tmp_path, {"LADDER_DTYPE": "float64", **TWIN, **env}).finish()
        return load(tmp_path / f"{name}.pt"), text

    return trained


def test_two_devices_train_as_one_does(trained):
    """In float64. With --compile, torch splits the graph where DDP's buckets end, and prints the
    parts. With one part, no all-reduce would begin before the backward pass has ended."""
    expected, _ = trained("single_gpu.py", "one")
    for name, launch in {"dp": "data_parallel.py", "ddp": TORCHRUN.format(2)}.items():
        assert difference(trained(launch, name)[0], expected) < 1e-9
    snapshot, text = trained(LONG, "compile", "--compile", TORCH_LOGS="ddp_graphs")
    assert difference(snapshot, expected) < 1e-9
    assert "---split graph---" in text and "---submod_1 graph---" in text


@pytest.mark.skipif(not count, reason="a CPU has no SyncBatchNorm")
def test_sync_batchnorm_is_batchnorm_over_the_global_batch(trained):
    model = ("--model", "resnet18")
    expected, _ = trained("single_gpu.py", "one", *model)
    assert difference(trained(LONG, "sync", *model, "--sync-bn")[0], expected) < 1e-8
    assert difference(trained(TORCHRUN.format(2), "bn", *model)[0], expected) > 1e-5


def test_resume_is_exact_with_deterministic_kernels(trained):
    exact = {"LADDER_DTYPE": "float32", "LADDER_EXACT": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    model = ("--model", "convnet")
    whole, _ = trained(TORCHRUN.format(2), "whole", *model, **exact)
    trained(TORCHRUN.format(2), "part", *model, total=1, **exact)
    resumed, _ = trained(TORCHRUN.format(2), "part", *model, "--resume", **exact)
    assert resumed["epoch"] == 2 and same_bytes(whole, resumed)


def test_trains_on_all_devices(start):
    """As a user starts them, but at the same time. ddp_spawn.py takes one process per GPU."""
    ranks = count if count > 1 else 2
    launches = ["single_gpu.py", "data_parallel.py", "ddp_spawn.py", TORCHRUN.format(ranks)]
    options = (3, "--batch-size", 16, "--snapshot-path")
    jobs = [start(launch, *options, f"{n}.pt", **TWIN) for n, launch in enumerate(launches)]
    for job in jobs:
        assert epochs(job.finish())[-1]["accuracy"] > 97
        assert ("on cuda" in job.text) is (count > 0)
    lines = re.findall(r"^\[rank \d+ of \d+\] on cuda:(\d+)", jobs[2].text, re.M)
    assert sorted(map(int, lines)) == [*range(count)]


def test_an_exception_in_one_rank_ends_the_other(start, record_property):
    job = start(TORCHRUN.format(2), 99, LADDER_RAISE="1:1000", **TWIN)
    job.wait_for(r"Epoch 3 \| Batchsize: ")
    since = time.monotonic()
    assert "ArithmeticError: the test's own error" in job.finish(1)  # and nobody is left
    record_property("an exception in one rank: until the job is over", time.monotonic() - since)
