"""common/seed.py: ranks and devices draw differently, and go on drawing after a resume."""

import contextlib
import io
import random
import subprocess
import sys

import numpy as np
import torch
from helpers.jobs import ROOT

from common.seed import get_rng_state, set_rng_state, set_seed, use_deterministic_kernels


def draw() -> tuple:
    return random.random(), np.random.rand(), torch.rand(3).tolist(), torch.randn(5).tolist()


def test_seeds_differ_by_rank_and_repeat():
    draws = {}
    for rank in (0, 1, 2, 0):
        set_seed(42, rank)
        drawn = draw()
        assert draws.setdefault(rank, drawn) == drawn
    for values in zip(*draws.values(), strict=True):
        assert len({str(value) for value in values}) == 3
    set_seed(2**32 - 1, rank=5)  # NumPy takes 32 bits only


def test_rng_state_survives_a_snapshot_that_is_loaded_safely():
    set_seed(3)
    draw()
    buffer = io.BytesIO()
    torch.save(get_rng_state(torch.device("cpu")), buffer)
    expected = draw()
    buffer.seek(0)
    set_rng_state(torch.load(buffer, weights_only=True), torch.device("cpu"))
    assert draw() == expected


class FakeDevice:
    """Two accelerators' generators; torch.get_device_module gives a module, and this one."""

    def __init__(self, monkeypatch) -> None:
        self.generators, self.current = [torch.Generator(), torch.Generator()], 0
        monkeypatch.setattr(torch, "get_device_module", lambda device: self)
        monkeypatch.setattr(torch.accelerator, "device_index", self.device_index)

    @contextlib.contextmanager
    def device_index(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def manual_seed(self, seed):
        self.generators[self.current].manual_seed(seed)

    def get_rng_state(self, device):
        return self.generators[device.index].get_state()

    def set_rng_state(self, state, device):
        self.generators[device.index].set_state(state)

    def draw(self) -> list[list[float]]:
        return [torch.rand(3, generator=generator).tolist() for generator in self.generators]


def test_each_device_of_a_process_draws_its_own_and_is_restored(monkeypatch):
    fake, devices = FakeDevice(monkeypatch), [torch.device("cuda", i) for i in (0, 1)]
    set_seed(7, devices=devices)
    first, second = fake.draw()
    assert first != second
    assert first == torch.rand(3, generator=torch.Generator().manual_seed(7)).tolist()
    state = get_rng_state(*devices)
    expected = fake.draw()
    set_rng_state(state, *devices)
    assert fake.draw() == expected
    set_rng_state(get_rng_state(devices[0]), *devices)  # of a run on one device: for the first one
    set_rng_state(state, torch.device("xpu", 0))  # another type keeps its own


def test_deterministic_kernels():
    use = use_deterministic_kernels.__name__
    code = (
        f"import os, torch; from common.seed import {use}\n"
        f"assert not torch.are_deterministic_algorithms_enabled()\n"
        f"{use}(); assert torch.are_deterministic_algorithms_enabled()\n"
        f"assert os.environ['CUBLAS_WORKSPACE_CONFIG'] and not torch.backends.cudnn.benchmark"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
