"""common/seed.py: what is drawn is a function of the numbers given, and of nothing else."""

import random
import subprocess
import sys

import numpy as np
import torch
from helpers.jobs import ROOT
from helpers.parts import CPU

from common.seed import set_seed, use_deterministic_kernels


def draw() -> tuple:
    return random.random(), np.random.rand(), torch.rand(3).tolist(), torch.randn(5).tolist()


def test_draws_differ_by_every_number_and_repeat():
    draws = {}
    numbers = [(0,), (42,), (42, 0), (42, 1), (42, 1, 0), (42, 0, 1), (42, 1, 0, 0), (43, 0)]
    for given in (*numbers, *reversed(numbers)):
        set_seed(CPU, *given)
        drawn = draw()
        assert draws.setdefault(given, drawn) == drawn
    for values in zip(*draws.values(), strict=True):
        assert len({str(value) for value in values}) == len(numbers)
    set_seed(CPU, 2**64, 5)  # NumPy takes 32 bits only


def test_the_device_is_seeded_too(monkeypatch):
    seeds = []
    device_module = type("DeviceModule", (), {"manual_seed": staticmethod(seeds.append)})
    monkeypatch.setattr(torch, "get_device_module", lambda device: device_module)
    for rank in (0, 1, 0):
        set_seed(torch.device("cuda"), 7, rank)
    assert seeds[0] == seeds[2] != seeds[1]


def test_deterministic_kernels():
    use = use_deterministic_kernels.__name__
    code = (
        f"import os, torch; from common.seed import {use}\n"
        f"assert not torch.are_deterministic_algorithms_enabled()\n"
        f"{use}(); assert torch.are_deterministic_algorithms_enabled()\n"
        f"assert os.environ['CUBLAS_WORKSPACE_CONFIG'] and not torch.backends.cudnn.benchmark"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
