"""Seeding: a call before the model is made, one after it, and what a snapshot keeps."""

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def use_deterministic_kernels() -> None:
    """Choose deterministic kernels on accelerators, and fail where there are none. Slower.

    Call it before anything is put on a device and before the process group is made: NCCL and
    cuBLAS choose theirs then. https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def set_seed(seed: int, rank: int = 0, devices: Sequence[torch.device] = ()) -> None:
    """Seed Python, NumPy and torch (the CPU and every accelerator).

    Call it with rank 0 on every process before the model is made: all ranks start from the same
    weights. (DDP would broadcast rank 0's anyway; nn.DataParallel has only one copy.) Call it once
    more with the process's own rank afterwards: dropout and augmentation then differ between
    ranks, as they differ between the samples of one large batch.

    Args:
        seed: 0 or more, the same on every rank. Only its last 32 bits count.
        rank: global rank. Rank 0 gets `seed` itself.
        devices: the accelerators that this process computes on, where these are several: each
            gets a stream of its own, the first one `seed`'s. (torch seeds all alike.)
    """
    # A prime stride: neighbouring seeds and neighbouring ranks never share a stream.
    value = (seed + 1_000_003 * rank) % 2**32
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    for number, device in enumerate(devices):
        if device.type == "cpu":
            continue
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).manual_seed(value + number)


def get_rng_state(*devices: torch.device) -> dict[str, Any]:
    """This process's random number generators, as plain types and uint8 tensors.

    `torch.load(..., weights_only=True)` refuses NumPy's own state, so its key array (uint32, 624
    words) goes in as a list.

    Args:
        devices: those that this process computes on.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, gauss),
        "cpu": torch.get_rng_state(),
    }
    for device in devices:
        if device.type != "cpu":
            device_state = torch.get_device_module(device).get_rng_state(device)
            state.setdefault(device.type, []).append(device_state)
    return state


def set_rng_state(state: dict[str, Any], *devices: torch.device) -> None:
    """Restore what `get_rng_state` returned. A device without a state in it keeps its own.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: `state` is not such a state.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    for number, device in enumerate(devices):
        if device.type != "cpu" and number < len(state.get(device.type, [])):
            torch.get_device_module(device).set_rng_state(state[device.type][number], device)
