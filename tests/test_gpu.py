"""On accelerators. Run these where there are some: pytest -m gpu."""

import re

import pytest
import torch
from conftest import TORCHRUN, difference, epochs, load, losses, same_bytes

found = torch.accelerator.current_accelerator(check_available=True)
count = torch.accelerator.device_count() if found else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count == 0, reason="no accelerator on this machine"),
]


@pytest.mark.parametrize("script", ["single_gpu.py", "data_parallel.py", "ddp_spawn.py"])
def test_trains_on_all_devices(run, tmp_path, script):
    text = run(script, 3)
    assert epochs(text)[-1]["accuracy"] > 97
    assert "[CPU" not in text
    if script == "ddp_spawn.py":
        devices = re.findall(r"^\[rank .* device \w+:(\d+) \| backend (\w+)", text, re.M)
        assert sorted(int(device) for device, _ in devices) == list(range(count))
    if script == "data_parallel.py" and count > 1:
        assert f"split over {count} devices" in text


def test_data_parallel_and_ddp_agree_with_one_device(run, tmp_path, fashion):
    env = {"LADDER_DTYPE": "float64"}
    common = (2, *fashion(500, 10), "--no-progress")
    run("single_gpu.py", *common, "--batch-size", 16 * count, "--snapshot-path", "one.pt", **env)
    for script, size in (("data_parallel.py", 16 * count), ("ddp_spawn.py", 16)):
        run(script, *common, "--batch-size", size, **env)
        assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "one.pt")) < 1e-9


def test_resume_is_exact_with_deterministic_kernels(run, tmp_path):
    options = ("--deterministic", "--no-progress")
    run("ddp_spawn.py", 2, *options, "--snapshot-path", "whole.pt")
    run("ddp_spawn.py", 1, *options)
    run("ddp_spawn.py", 2, *options, "--resume")
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) == 0


def test_gloo_processes_may_share_a_device(run):
    text = run("ddp_spawn.py", 1, "--backend", "gloo", "--nproc-per-node", count + 1)
    assert text.count("backend gloo") == count + 1


def test_more_processes_than_devices_are_refused(run):
    text = run("ddp_spawn.py", 1, "--nproc-per-node", count + 1, status=2)
    assert f"are more than {count} devices" in text


def test_torchrun_with_nccl_at_one_process(run):
    text = run(TORCHRUN.format(1), 3, "--no-progress")
    assert "| backend nccl |" in text and epochs(text)[-1]["accuracy"] > 97


def test_fp16_scales_and_the_scaler_is_resumed(run, tmp_path):
    options = ("--amp", "fp16", "--deterministic", "--no-progress")
    text = run(TORCHRUN.format(1), 2, *options, "--snapshot-path", "whole.pt")
    assert epochs(text)[-1]["accuracy"] > 90
    run(TORCHRUN.format(1), 1, *options)
    assert load(tmp_path / "checkpoint.pt")["scaler"]["scale"] > 1
    run(TORCHRUN.format(1), 2, *options, "--resume")
    resumed, whole = load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")
    assert resumed["scaler"] == whole["scaler"] and same_bytes(resumed, whole)


def test_sync_batchnorm_is_batchnorm_over_the_global_batch(run, tmp_path, fashion):
    """Two gloo processes that share the device, against one with twice the batch."""
    common = (1, *fashion(64, 10), "--model", "resnet18", "--no-progress", "--log-interval", 1)
    double = {"LADDER_DTYPE": "float64"}
    expected = losses(
        run("single_gpu.py", *common, "--batch-size", 16, "--snapshot-path", "one.pt", **double)
    )
    options = ("--backend", "gloo", "--batch-size", 8, "--device", found.type)
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
