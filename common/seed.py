"""Seeding: one call at the start, one after the model is made, and what a snapshot keeps."""

import os
import random
from typing import Any

import numpy as np
import torch


def set_seed(seed: int, rank: int = 0, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (the CPU and every accelerator).

    Call it with rank 0 on every process before the model is made: all ranks start from the same
    weights. (DDP would broadcast rank 0's anyway; nn.DataParallel has only one copy.) Call it once
    more with the process's own rank afterwards: dropout and augmentation then differ between
    ranks, as they differ between the samples of one large batch.

    Args:
        seed: 0 or more, the same on every rank. Only its last 32 bits count.
        rank: global rank. Rank 0 gets `seed` itself.
        deterministic: choose deterministic kernels on accelerators, and fail where there are none.
            Slower. https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    # A prime stride: neighbouring seeds and neighbouring ranks never share a stream.
    value = (seed + 1_000_003 * rank) % 2**32
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """This process's random number generators, as plain types and uint8 tensors.

    `torch.load(..., weights_only=True)` refuses NumPy's own state, so its key array (uint32, 624
    words) goes in as a list.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, gauss),
        "cpu": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `get_rng_state` returned. Another type of device keeps its own state.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: `state` is not such a state.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type])
