"""Randomness needs no state: what is drawn is a function of seed, rank, epoch and sample."""

import contextlib
import random

import numpy as np
import torch
from helpers.jobs import SCRIPTS
from helpers.parts import CPU, every_script, two_devices

from common.seed import set_seed


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


@every_script
def test_each_epoch_has_its_order_and_its_random_numbers(make, monkeypatch, script):
    """ddp_torchrun.py has numbers of their own for each step."""
    module, trainer = make(script, "--model", "mlp", "--batch-size", 8, "--seed", 7)
    trainer.rank, seeds, orders = 1 if script in SCRIPTS[2:] else 0, [], []
    monkeypatch.setattr(module, "set_seed", lambda *numbers: seeds.append(numbers))
    run_batch = trainer._run_batch
    trainer._run_batch = lambda *batch: orders[-1].extend(batch[1].tolist()) or run_batch(*batch)
    for epoch in (3, 4):
        orders.append([])
        trainer.samples_seen = 0
        trainer._run_epoch(epoch)
    assert len(orders[0]) == 40
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    expected = [(CPU, 7, trainer.rank, epoch) for epoch in (3, 4)]
    if script == "ddp_torchrun.py":
        expected = [(*epoch, seen) for epoch in expected for seen in range(0, 41, 8)]
    assert seeds == expected, f"--seed in {script}"


@every_script
def test_loading_data_draws_nothing_from_the_models_numbers(make, script):
    _, trainer = make(script)
    before = torch.get_rng_state()
    assert len(list(trainer.train_data)) == 2 and len(list(trainer.test_data)) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_data_parallel_seeds_each_of_its_devices(make, monkeypatch):
    module, _ = make("data_parallel.py")
    seeds, devices = [], []

    @contextlib.contextmanager
    def device_index(index):
        devices.append(index)
        yield
        devices.append(None)

    monkeypatch.setattr(torch.nn.DataParallel, "__init__", two_devices)
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    _, trainer = make("data_parallel.py", "--seed", 7)
    monkeypatch.setattr(module, "set_seed", lambda *numbers: seeds.append((devices[-1], *numbers)))
    trainer.model.forward = lambda source: trainer.model.module(source)  # on one device
    trainer._run_epoch(3)
    # The last one to be seeded is the one whose numbers the process itself goes on with.
    assert seeds == [(1, CPU, 7, 1, 3), (0, CPU, 7, 0, 3)]
