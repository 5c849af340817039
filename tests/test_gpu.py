"""On accelerators. Run these alone where there are some: pytest -m gpu.

Batches are given so that the global one is about 32 at any number of devices: with those that each
of eight takes by default, few epochs would be too few steps.
"""

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
each = max(1, 32 // max(1, count))  # of a global batch of about 32

no_ddp = pytest.mark.skipif(kind == "mps", reason="the scripts use no DDP on mps")
no_deterministic = pytest.mark.skipif(kind == "mps", reason="mps has no deterministic kernels")
two_devices = pytest.mark.skipif(count < 2, reason="needs two devices")


def has_float64() -> bool:
    if kind == "xpu":
        return torch.xpu.get_device_properties(0).has_fp64
    return kind != "mps"


@pytest.fixture
def double() -> dict[str, str]:
    if not has_float64():
        pytest.skip("this device has no float64, and in float32 rounding hides what is compared")
    return {"LADDER_DTYPE": "float64"}


@pytest.mark.parametrize(
    "script", ["single_gpu.py", "data_parallel.py", pytest.param("ddp_spawn.py", marks=no_ddp)]
)
def test_trains_on_all_devices(run, tmp_path, script):
    text = run(script, 3, "--batch-size", each if script == "ddp_spawn.py" else 32)
    assert epochs(text)[-1]["accuracy"] > 97
    assert "[CPU" not in text
    if script == "ddp_spawn.py":
        devices = re.findall(r"^\[rank .* device \w+:(\d+) \| backend (\w+)", text, re.M)
        assert sorted(int(device) for device, _ in devices) == list(range(count))


@no_ddp
def test_data_parallel_and_ddp_agree_with_one_device(run, tmp_path, fashion, double):
    common, size = (2, *fashion(500, 10)), each * count
    run("single_gpu.py", *common, "--batch-size", size, "--snapshot-path", "one.pt", **double)
    for script, size in (("data_parallel.py", each * count), ("ddp_spawn.py", each)):
        run(script, *common, "--batch-size", size, **double)
        assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "one.pt")) < 1e-9


@no_ddp
@no_deterministic
def test_resume_is_exact_with_deterministic_kernels(run, tmp_path):
    options = ("--batch-size", each, "--deterministic")
    run("ddp_spawn.py", 2, *options, "--snapshot-path", "whole.pt")
    run("ddp_spawn.py", 1, *options)
    run("ddp_spawn.py", 2, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


@no_deterministic
@two_devices
def test_data_parallel_resumes_the_dropout_of_every_device(run, tmp_path):
    options = ("--model", "convnet", "--deterministic")
    run("data_parallel.py", 2, *options, "--snapshot-path", "whole.pt")
    run("data_parallel.py", 1, *options)
    run("data_parallel.py", 2, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


@no_ddp
def test_more_processes_than_devices_are_refused(run):
    text = run("ddp_spawn.py", 1, "--nproc-per-node", count + 1, status=2)
    assert f"are more than {count} devices" in text


@no_ddp
def test_torchrun_takes_the_devices_own_backend_at_one_process(run):
    text = run(TORCHRUN.format(1), 3)
    backend = dist.get_default_backend_for_device(kind)  # nccl, xccl ...
    assert f"| backend {backend} |" in text and epochs(text)[-1]["accuracy"] > 97


@no_ddp
@no_deterministic
def test_fp16_scales_and_the_scaler_is_resumed(run, tmp_path):
    options = ("--amp", "fp16", "--deterministic")
    text = run(TORCHRUN.format(1), 2, *options, "--snapshot-path", "whole.pt")
    assert epochs(text)[-1]["accuracy"] > 90
    run(TORCHRUN.format(1), 1, *options)
    assert load(tmp_path / "checkpoint.pt")["scaler"]["scale"] > 1
    run(TORCHRUN.format(1), 2, *options, "--resume")
    resumed, whole = load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")
    assert resumed["scaler"] == whole["scaler"] and same_bytes(resumed, whole)


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
