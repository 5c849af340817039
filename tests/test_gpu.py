"""On accelerators: pytest -m gpu. One CUDA device stands for two, a rank each, by LADDER_TWIN.

REHEARSE=1 pytest -m gpu tests/test_gpu.py      the same on a CPU: do the tests themselves work?

Starting a program may take ten seconds there. So most runs share a start: a job of one process and
a job of two ranks call main() of the scripts for one run after the other. The faults, and the test
of all devices, have the command lines of a user.
"""

import functools
import importlib
import json
import os
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from helpers.files import difference, idx_files, load, same_bytes
from helpers.jobs import ROOT, TORCHRUN, Job, command, epochs
from torch import nn

found = torch.accelerator.current_accelerator(check_available=True)
kind = found.type if found else "cpu"
count = torch.accelerator.device_count() if found else 0
one_gpu = kind == "cuda" and count == 1
TWIN = {"LADDER_TWIN": "2"} if one_gpu else {}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),  # one after the other: each takes all devices
    pytest.mark.skipif(not found and not os.environ.get("REHEARSE"), reason="no accelerator here"),
]
pair = kind != "mps" and (count != 1 or one_gpu)
two_ranks = pytest.mark.skipif(not pair, reason="needs two devices, or one of CUDA")
cuda = pytest.mark.skipif(kind != "cuda", reason="data_parallel.py takes CUDA and ROCm alone")
no_cpu = pytest.mark.skipif(kind == "cpu", reason="a CPU has no SyncBatchNorm")

# The global batch is 32. An epoch of the odd data ends with one of 2, and that of the even is full.
no_double = kind == "xpu" and not torch.xpu.get_device_properties(0).has_fp64
DTYPE, CLOSE = ("float32", 1e-3) if no_double else ("float64", 1e-9)
ALONE = {  # by one process: dtype, or "exact" for float32 with deterministic kernels; the command
    "one": f"{DTYPE} single_gpu.py 2 --batch-size 32 --data-dir odd",
    "one-bn": f"{DTYPE} single_gpu.py 1 --batch-size 32 --data-dir even --model resnet18",
}
if kind == "cuda":  # if there is one, it is given twice
    ALONE["data-parallel"] = f"{DTYPE} data_parallel.py 2 --batch-size 32 --data-dir odd"
same = "--batch-size 16 --data-dir odd"
TOGETHER = {  # by two ranks
    "ddp": f"{DTYPE} ddp_torchrun.py 2 {same}",
    "accumulate": f"{DTYPE} ddp_torchrun.py 2 --batch-size 4 --accumulate 4 --data-dir odd",
    "whole": f"exact ddp_torchrun.py 2 {same} --model convnet",
    "half": f"exact ddp_torchrun.py 1 {same} --model convnet",
    "resumed": f"exact ddp_torchrun.py 2 {same} --model convnet --resume --snapshot-path half.pt",
    "bn": f"{DTYPE} ddp_torchrun.py 1 --batch-size 16 --data-dir even --model resnet18",
    "compile": f"{DTYPE} ddp_torchrun.py 2 {same} --compile",
}
if kind != "cpu":
    TOGETHER["sync-bn"] = f"{TOGETHER['bn']} --sync-bn"


def main(runs: dict[str, str]) -> None:
    """In processes of their own: one run after the other."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.pop("WORLD_SIZE", 1))
    sys.path.insert(0, str(ROOT))
    join = dist.init_process_group
    torch.set_float32_matmul_precision = lambda _: None  # TF32 would round to three digits
    torch.backends.cudnn.allow_tf32 = False
    if count == 1:
        nn.DataParallel = functools.partial(nn.DataParallel, device_ids=[0, 0])
    for name, run in runs.items():
        dtype, script, *words = run.split()
        torch.set_default_dtype(torch.float32 if dtype == "exact" else getattr(torch, dtype))
        torch.use_deterministic_algorithms(dtype == "exact")
        store = f"file://{os.getcwd()}/store-{name}"  # each group needs a new one
        dist.init_process_group = functools.partial(
            join, init_method=store, rank=rank, world_size=world_size
        )
        sys.argv = [script, "--dataset", "fashion-mnist", "--snapshot-path", f"{name}.pt", *words]
        module = importlib.import_module(script.removesuffix(".py"))
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
    launches = [("python tests/test_gpu.py", ALONE, {}), (together, TOGETHER, TWIN)]
    jobs = [
        (runs, Job(command(launch, json.dumps(runs)), folder, env | more))
        for launch, runs, more in launches[: 1 + pair]
    ]

    def trained(name: str) -> tuple[dict, str]:
        ((runs, job),) = (started for started in jobs if name in started[0])
        job.wait_for(f"^end of {name}$", seconds=120 if found else 600)
        last = re.findall(r"--snapshot-path (\S+)", f"--snapshot-path {name}.pt {runs[name]}")[-1]
        return load(folder / last), job.text

    trained.data = folder / "odd"
    yield trained
    for _, job in jobs:
        job.kill()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("data-parallel", marks=cuda),
        pytest.param("ddp", marks=two_ranks),
        pytest.param("accumulate", marks=two_ranks),
        pytest.param("compile", marks=two_ranks),
    ],
)
def test_two_devices_train_as_one_does(trained, name):
    """In float64, where there is that. With --compile, torch splits the graph where DDP's buckets
    end, and prints the parts. With one part, no all-reduce would begin before the backward pass
    has ended."""
    snapshot, text = trained(name)
    assert difference(snapshot, trained("one")[0]) < CLOSE
    assert name != "compile" or ("---split graph---" in text and "---submod_1 graph---" in text)


@two_ranks
@no_cpu
def test_sync_batchnorm_is_batchnorm_over_the_global_batch(trained):
    one = trained("one-bn")[0]
    assert difference(trained("sync-bn")[0], one) < max(CLOSE, 1e-8)
    assert difference(trained("bn")[0], one) > 1e-5


@two_ranks
def test_resume_is_exact_with_deterministic_kernels(trained):
    whole, resumed = trained("whole")[0], trained("resumed")[0]
    assert resumed["epoch"] == 2 and same_bytes(whole, resumed)


def test_trains_on_all_devices(start):
    """As a user starts them, but at the same time."""
    ranks = 2 if kind == "cpu" or one_gpu else count
    launches = ["single_gpu.py", *["data_parallel.py"] * (kind in ("cuda", "cpu"))]
    launches += ["ddp_spawn.py", TORCHRUN.format(ranks)] if pair else []
    jobs = []
    for number, launch in enumerate(launches):
        options = (3, "--snapshot-path", f"{number}.pt")
        if "ddp" in launch:
            options += ("--batch-size", max(1, 32 // ranks))
        jobs.append(start(launch, *options, **(TWIN if "ddp" in launch else {})))
    for job in jobs:
        text = job.finish()
        assert epochs(text)[-1]["accuracy"] > 97 and ("[CPU" in text) is (kind == "cpu")
    numbers = [":0" if one_gpu else f":{rank}" if count else "" for rank in range(ranks)]
    for job in jobs[-2:] if pair else []:
        lines = re.findall(rf"^\[rank \d+ of {ranks}\] {kind}(.*)", job.text, re.M)
        assert sorted(lines) == sorted(numbers)


# --- faults ---------------------------------------------------------------------------------------


@pytest.fixture
def over(record_property):
    """over(since, what): seconds for tools/gpu.py's report. A rehearsal on a CPU has no limit."""

    def over(since: float, what: str, limit: float = 1000) -> None:
        seconds = time.monotonic() - since
        record_property(what, f"{seconds:.1f}")
        assert seconds < limit or not found, what

    return over


@two_ranks
def test_an_exception_in_one_rank_ends_the_other(start, over):
    job = start(TORCHRUN.format(2), 99, "--log-interval", 1, LADDER_RAISE="1:150", **TWIN)
    job.wait_for(r"Step 149 \| Loss")
    since = time.monotonic()
    text = job.finish(1)  # and nobody is left
    over(since, "an exception in one rank: until the job is over", limit=5)
    assert "ArithmeticError: the test's own error" in text


@two_ranks
def test_all_ranks_refuse_a_snapshot_together(start, over, trained, tmp_path):
    torch.save(trained("whole")[0], tmp_path / "checkpoint.pt")
    options = ("--dataset", "fashion-mnist", "--data-dir", trained.data, "--model", "convnet")
    job = start(TORCHRUN.format(2), 9, *options, "--momentum", 0.5, "--resume", **TWIN)
    job.wait_for("^error: ")
    since = time.monotonic()
    text = job.finish(1)
    over(since, "a snapshot that is refused: until the job is over", limit=5)
    assert text.count("error: checkpoint.pt was made with momentum 0.9, not 0.5\n") == 2


@two_ranks
def test_a_killed_rank_is_restarted(start, over, trained, tmp_path):
    """With --save-steps, so within an epoch, and ends with the weights of an undisturbed run."""
    options = (2, "--dataset", "fashion-mnist", "--data-dir", trained.data, "--batch-size", 16)
    options += ("--save-steps", 5, "--resume")
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1, "LADDER_DTYPE": DTYPE, **TWIN}
    job = start(TORCHRUN.format("2 --max-restarts=1"), *options, LADDER_SLOW="0:0.05", **env)
    job.wait_for(r"^Epoch 1 \| Step 35 \| Saved at")
    os.kill(job.workers()[1], signal.SIGKILL)
    since = time.monotonic()
    job.wait_for("^Resuming training from snapshot at Epoch 1")
    over(since, "kill -9 of a rank, --max-restarts=1: until training goes on")
    job.finish()
    assert difference(load(tmp_path / "checkpoint.pt"), trained("ddp")[0]) < CLOSE


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
