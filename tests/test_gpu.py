"""On accelerators. Run these alone where there are some: pytest -m gpu.

Batches are given so that the global one is about 32 at any number of devices: with those that each
of eight takes by default, few epochs would be too few steps.
"""

import re

import pytest
import torch
import torch.distributed as dist
from helpers.files import difference, load, same_bytes
from helpers.jobs import TORCHRUN, epochs, losses

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
no_gloo = pytest.mark.skipif(
    kind not in dist.Backend.backend_capability["gloo"], reason=f"gloo does not take {kind} tensors"
)


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
    if script == "data_parallel.py" and count > 1:
        assert f"split over {count} devices" in text


@no_ddp
def test_data_parallel_and_ddp_agree_with_one_device(run, tmp_path, fashion, double):
    common, size = (2, *fashion(500, 10), "--no-progress"), each * count
    run("single_gpu.py", *common, "--batch-size", size, "--snapshot-path", "one.pt", **double)
    for script, size in (("data_parallel.py", each * count), ("ddp_spawn.py", each)):
        run(script, *common, "--batch-size", size, **double)
        assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "one.pt")) < 1e-9


@no_ddp
@no_deterministic
def test_resume_is_exact_with_deterministic_kernels(run, tmp_path):
    options = ("--batch-size", each, "--deterministic", "--no-progress")
    run("ddp_spawn.py", 2, *options, "--snapshot-path", "whole.pt")
    run("ddp_spawn.py", 1, *options)
    run("ddp_spawn.py", 2, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


@no_deterministic
@pytest.mark.skipif(count < 2, reason="needs two devices")
def test_data_parallel_resumes_the_dropout_of_every_device(run, tmp_path):
    options = ("--model", "convnet", "--deterministic", "--no-progress")
    run("data_parallel.py", 2, *options, "--snapshot-path", "whole.pt")
    run("data_parallel.py", 1, *options)
    states = load(tmp_path / "checkpoint.pt")["rng_states"][0][kind]
    assert len(states) == count
    for number, state in enumerate(states):
        assert not any(torch.equal(state, other) for other in states[:number])
    run("data_parallel.py", 2, *options, "--resume")
    resumed, whole = load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")
    assert same_bytes(resumed, whole)
    for state, other in zip(*(s["rng_states"][0][kind] for s in (resumed, whole)), strict=True):
        assert torch.equal(state, other)


@no_gloo
def test_gloo_processes_may_share_a_device(run):
    text = run("ddp_spawn.py", 1, "--backend", "gloo", "--nproc-per-node", count + 1)
    assert text.count("backend gloo") == count + 1


@no_ddp
def test_more_processes_than_devices_are_refused(run):
    text = run("ddp_spawn.py", 1, "--nproc-per-node", count + 1, status=2)
    assert f"are more than {count} devices" in text


@no_ddp
def test_torchrun_takes_the_devices_own_backend_at_one_process(run):
    text = run(TORCHRUN.format(1), 3, "--no-progress")
    backend = dist.get_default_backend_for_device(kind)  # nccl, xccl ...
    assert f"| backend {backend} |" in text and epochs(text)[-1]["accuracy"] > 97


@no_ddp
@no_deterministic
def test_fp16_scales_and_the_scaler_is_resumed(run, tmp_path):
    options = ("--amp", "fp16", "--deterministic", "--no-progress")
    text = run(TORCHRUN.format(1), 2, *options, "--snapshot-path", "whole.pt")
    assert epochs(text)[-1]["accuracy"] > 90
    run(TORCHRUN.format(1), 1, *options)
    assert load(tmp_path / "checkpoint.pt")["scaler"]["scale"] > 1
    run(TORCHRUN.format(1), 2, *options, "--resume")
    resumed, whole = load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")
    assert resumed["scaler"] == whole["scaler"] and same_bytes(resumed, whole)


@no_gloo
def test_sync_batchnorm_is_batchnorm_over_the_global_batch(run, tmp_path, fashion, double):
    """Two gloo processes, on one device where there is one, against one with twice the batch."""
    common = (1, *fashion(64, 10), "--model", "resnet18", "--no-progress", "--log-interval", 1)
    expected = losses(
        run("single_gpu.py", *common, "--batch-size", 16, "--snapshot-path", "one.pt", **double)
    )
    options = ("--backend", "gloo", "--batch-size", 8, "--device", kind)
    text = run(TORCHRUN.format(2), *common, *options, "--sync-bn", **double)
    assert text.count("backend gloo") == 2 and len(expected) == 4
    assert losses(text) == pytest.approx(expected, abs=1e-5)
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "one.pt")) < 1e-8
    assert losses(run(TORCHRUN.format(2), *common, *options, **double)) != pytest.approx(
        expected, abs=1e-5
    )


def test_multinode_check_times_the_device(run):
    text = run("multinode.py", "--check", "--model", "mlp")
    assert "All-reduce | 2.68 MB" in text and "Epoch | 375 steps" in text
