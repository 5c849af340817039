"""On GPUs: pytest -m gpu. One CUDA device stands for two, a rank each, by LADDER_TWIN.

REHEARSE=1 pytest -m gpu tests/test_gpu.py      the same on a CPU: do the tests themselves work?

Starting a program may take ten seconds there. So most runs share a start: a job of one process and
a job of two ranks call main() of the scripts for one run after the other.
"""

import functools
import importlib
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.files import difference, idx_files, load, same_bytes
from helpers.jobs import ROOT, TORCHRUN, Job, command, epochs
from torch import nn

count = torch.cuda.device_count()
TWIN = {"LADDER_TWIN": "1"} if count == 1 else {}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),  # one after the other: each takes all devices
    pytest.mark.skipif(not count and not os.environ.get("REHEARSE"), reason="no GPU here"),
]

# The global batch is 32. An epoch of the odd data ends with one of 2, and that of the even is full.
# dtype, or "exact" for float32 with deterministic kernels; script; options
ALONE = {
    "one": "float64 single_gpu.py 2 --batch-size 32 --data-dir odd",
    "one-bn": "float64 single_gpu.py 1 --batch-size 32 --data-dir even --model resnet18",
    "data-parallel": "float64 data_parallel.py 2 --batch-size 32 --data-dir odd",
}
same = "2 --batch-size 16 --data-dir odd"
TOGETHER = {  # by two ranks
    "ddp": f"float64 ddp_torchrun.py {same}",
    "by-hand": f"float64 multinode.py {same}",
    "whole": f"exact ddp_torchrun.py {same} --model convnet",
    "half": f"exact ddp_torchrun.py {same.replace('2', '1', 1)} --model convnet",
    "resumed": f"exact ddp_torchrun.py {same} --model convnet --resume --snapshot-path half.pt",
    "long": "float64 recipes/long_run.py 2 --batch-size 4 --accumulate 4 --data-dir odd",
    "compile": f"float64 recipes/long_run.py {same} --compile",
    "bn": "float64 ddp_torchrun.py 1 --batch-size 16 --data-dir even --model resnet18",
}
if count:  # a CPU has no SyncBatchNorm
    TOGETHER["sync-bn"] = f"{TOGETHER['bn'].replace('ddp_torchrun', 'recipes/long_run')} --sync-bn"


def main(runs: dict[str, str]) -> None:
    """In processes of their own: one run after the other."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
    join = dist.init_process_group
    torch.set_float32_matmul_precision = lambda _: None  # TF32 would round to three digits
    torch.backends.cudnn.allow_tf32 = False
    if count == 1:
        nn.DataParallel = functools.partial(nn.DataParallel, device_ids=[0, 0])
    for name, run in runs.items():
        dtype, script, *words = run.split()
        torch.set_default_dtype(torch.float32 if dtype == "exact" else getattr(torch, dtype))
        torch.use_deterministic_algorithms(dtype == "exact")
        # Each group needs a new store.
        given = {"init_method": f"file://{os.getcwd()}/store-{name}", "rank": rank}
        dist.init_process_group = lambda backend, given=given, **_: join(
            backend, world_size=world_size, **given
        )
        sys.argv = [script, "--dataset", "fashion-mnist", "--snapshot-path", f"{name}.pt", *words]
        module = importlib.import_module(Path(script).stem)
        getattr(module.main, "__wrapped__", module.main)(module.parse_args())
        if rank == 0:
            print(f"end of {name}", flush=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(name) -> the snapshot of this run, and what its processes have printed so far."""
    folder = tmp_path_factory.mktemp("trained")
    for data, size in (("odd", 26 * 32 + 2), ("even", 128)):
        idx_files(folder / data, size, 10)
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCH_LOGS": "ddp_graphs"}
    together = TORCHRUN.format(2).replace("ddp_torchrun.py", "tests/test_gpu.py")
    jobs = [
        (runs, Job(command(launch, json.dumps(runs)), folder, env | more))
        for launch, runs, more in (
            ("python tests/test_gpu.py", ALONE, {}),
            (together, TOGETHER, TWIN),
        )
    ]

    def trained(name: str) -> tuple[dict, str]:
        ((runs, job),) = (started for started in jobs if name in started[0])
        job.wait_for(f"^end of {name}$", seconds=120 if count else 600)
        last = re.findall(r"--snapshot-path (\S+)", f"--snapshot-path {name}.pt {runs[name]}")[-1]
        return load(folder / last), job.text

    yield trained
    for _, job in jobs:
        job.kill()


@pytest.mark.parametrize("name", ["data-parallel", "ddp", "by-hand", "long", "compile"])
def test_two_devices_train_as_one_does(trained, name):
    """In float64. With --compile, torch splits the graph where DDP's buckets end, and prints the
    parts. With one part, no all-reduce would begin before the backward pass has ended."""
    snapshot, text = trained(name)
    assert difference(snapshot, trained("one")[0]) < 1e-9
    assert name != "compile" or ("---split graph---" in text and "---submod_1 graph---" in text)


@pytest.mark.skipif(not count, reason="a CPU has no SyncBatchNorm")
def test_sync_batchnorm_is_batchnorm_over_the_global_batch(trained):
    one = trained("one-bn")[0]
    assert difference(trained("sync-bn")[0], one) < 1e-8
    assert difference(trained("bn")[0], one) > 1e-5


def test_resume_is_exact_with_deterministic_kernels(trained):
    whole, resumed = trained("whole")[0], trained("resumed")[0]
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


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
