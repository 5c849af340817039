"""On GPUs: pytest -m gpu. One CUDA device stands for two, a rank each, by LADDER_TWIN.

REHEARSE=1 pytest -m gpu tests/test_gpu.py      the same on a CPU: do the tests themselves work?
"""

import os
import re
import time

import pytest
import torch
from helpers.files import difference, idx_files, load
from helpers.jobs import TORCHRUN, epochs

count = torch.cuda.device_count()
TWIN = {"LADDER_TWIN": "1"} if count == 1 else {}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),  # one after the other: each takes all devices
    pytest.mark.skipif(not count and not os.environ.get("REHEARSE"), reason="no GPU here"),
]
LONG = TORCHRUN.replace("ddp_torchrun.py", "recipes/long_run.py").format(2)


def test_two_devices_train_as_one_does(run, tmp_path):
    """In float64. The last batch of an epoch has two samples. With --compile, torch splits the
    graph where DDP's buckets end, and prints the parts: with one part, no all-reduce would begin
    before the backward pass has ended."""
    data = ("--dataset", "fashion-mnist", "--data-dir", idx_files(tmp_path, 26 * 32 + 2, 10))
    env, texts = {"LADDER_DTYPE": "float64", "TORCH_LOGS": "ddp_graphs", **TWIN}, []
    one = ("--batch-size", 32, "--snapshot-path")
    two = ("--batch-size", 16, "--snapshot-path")
    for number, (launch, *options) in enumerate(
        [
            ("single_gpu.py", *one),
            ("data_parallel.py", *one),
            (TORCHRUN.format(2), *two),
            (LONG, "--compile", *two),
        ]
    ):
        texts.append(run(launch, 2, *data, *options, f"{number}.pt", **env))
        snapshot = load(tmp_path / f"{number}.pt")
        assert difference(snapshot, load(tmp_path / "0.pt")) < 1e-9
    assert "---split graph---" in texts[3] and "---submod_1 graph---" in texts[3]


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
