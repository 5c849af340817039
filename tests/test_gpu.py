"""On accelerators, with a global batch of about 32 at any number of them: pytest -m gpu"""

import re

import pytest
import torch
import torch.distributed as dist
from helpers.files import difference, load, same_bytes
from helpers.jobs import TORCHRUN, epochs

found = torch.accelerator.current_accelerator(check_available=True)
count = torch.accelerator.device_count() if found else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),  # one after the other: each takes all devices
    pytest.mark.skipif(count == 0, reason="no accelerator on this machine"),
]
kind = found.type if found else "cpu"
each = max(1, 32 // max(1, count))

no_ddp = pytest.mark.skipif(kind == "mps", reason="the scripts use no DDP on mps")
no_deterministic = pytest.mark.skipif(kind == "mps", reason="mps has no deterministic kernels")
cuda = pytest.mark.skipif(kind != "cuda", reason="data_parallel.py takes CUDA and ROCm alone")
two_devices = pytest.mark.skipif(count < 2, reason="needs two devices")


@pytest.fixture
def double() -> dict[str, str]:
    if kind == "mps" or (kind == "xpu" and not torch.xpu.get_device_properties(0).has_fp64):
        pytest.skip("this device has no float64")
    return {"LADDER_DTYPE": "float64"}


@pytest.mark.parametrize(
    ("launch", "batch_size"),
    [
        ("single_gpu.py", 32),
        pytest.param("data_parallel.py", 32, marks=cuda),
        pytest.param("ddp_spawn.py", each, marks=no_ddp),
        pytest.param(TORCHRUN.format(max(1, count)), each, marks=no_ddp),
    ],
)
def test_trains_on_all_devices(run, launch, batch_size):
    text = run(launch, 3, "--batch-size", batch_size)
    assert epochs(text)[-1]["accuracy"] > 97 and "[CPU" not in text
    if "ddp" in launch:
        devices = re.findall(r"^\[rank .* device \w+:(\d+) \| backend (\w+)", text, re.M)
        backend = dist.get_default_backend_for_device(kind)  # nccl, xccl ...
        assert sorted(devices) == [(str(device), backend) for device in range(count)]


@no_ddp
def test_data_parallel_and_ddp_agree_with_one_device(run, tmp_path, fashion, double):
    # So many that all ranks have as many, or some would repeat samples. Each epoch's last batch is
    # short: one sample for each rank, where it has more in the others.
    common, size = (2, *fashion(count * (26 * each + 1), 10)), each * count
    run("single_gpu.py", *common, "--batch-size", size, "--snapshot-path", "one.pt", **double)
    scripts = {"data_parallel.py": each * count} if kind == "cuda" else {}
    for script, size in {**scripts, "ddp_spawn.py": each}.items():
        run(script, *common, "--batch-size", size, **double)
        assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "one.pt")) < 1e-9


@no_deterministic
@pytest.mark.parametrize(
    ("launch", "options"),
    [
        pytest.param("data_parallel.py", (), marks=(cuda, two_devices)),  # dropout of each device
        ("ddp_spawn.py", ("--batch-size", 16, "--nproc-per-node", min(2, max(1, count)))),
        (TORCHRUN.format(1), ("--amp",)),
    ],
)
def test_resume_is_exact_with_deterministic_kernels(run, tmp_path, launch, options):
    """With more than two processes it is to rounding."""
    options += ("--model", "convnet", "--deterministic")
    text = run(launch, 2, *options, "--snapshot-path", "whole.pt")
    assert epochs(text)[-1]["accuracy"] > 90
    run(launch, 1, *options)
    run(launch, 2, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


@no_ddp
@two_devices
def test_sync_batchnorm_is_batchnorm_over_the_global_batch(run, tmp_path, fashion, double):
    """Two processes against one with twice the batch."""
    common = (1, *fashion(64, 10), "--model", "resnet18")
    run("single_gpu.py", *common, "--batch-size", 16, "--snapshot-path", "one.pt", **double)
    one = load(tmp_path / "one.pt")
    run(TORCHRUN.format(2), *common, "--batch-size", 8, "--sync-bn", **double)
    assert difference(load(tmp_path / "checkpoint.pt"), one) < 1e-8
    run(TORCHRUN.format(2), *common, "--batch-size", 8, **double)
    assert difference(load(tmp_path / "checkpoint.pt"), one) > 1e-5
