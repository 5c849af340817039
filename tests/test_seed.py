"""Randomness needs no state: what is drawn is a function of seed, rank, epoch and sample."""

import random
from collections import UserList

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.jobs import SCRIPTS, every_script

from common.seed import set_seed


def test_draws_differ_by_every_number_and_repeat():
    draws = {}
    numbers = [(0,), (42,), (42, 0), (42, 1), (42, 1, 0), (42, 0, 1), (42, 1, 0, 0), (43, 0)]
    for given in (*numbers, *reversed(numbers)):
        set_seed(*given)
        drawn = (random.random(), np.random.rand(), torch.rand(()).item())
        assert draws.setdefault(given, drawn) == drawn
    for values in zip(*draws.values(), strict=True):
        assert len({*values}) == len(numbers)
    for seed in (2**64, -1):  # NumPy takes 32 bits only, and none below 0
        set_seed(seed, 5)
        first = torch.rand(())
        set_seed(seed + 1, 5)
        assert torch.rand(()) != first


def test_all_devices_are_seeded_too(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    for rank in (0, 1, 0):
        set_seed(7, rank)
    assert seeds[0] == seeds[2] != seeds[1]


def classes(batches: list | torch.Tensor, rest: torch.Tensor | int) -> list[int]:
    """Of what _run_batch() is given: inputs and targets, or micro-batches and their samples."""
    targets = torch.cat([pair[1] for pair in batches]) if isinstance(batches, list) else rest
    return targets.tolist()


@every_script
def test_each_epoch_has_its_order_and_its_random_numbers(make, monkeypatch, script):
    """ddp_torchrun.py may begin in mid-epoch, so it has one number more."""
    module, trainer = make(script, "--model", "mlp", "--batch-size", 8, "--seed", 7)
    trainer.rank, seeds, orders = 1 if script in SCRIPTS[2:] else 0, [], []
    monkeypatch.setattr(module, "set_seed", lambda *numbers: seeds.append(numbers))
    trainer._run_batch = lambda *given: orders[-1].extend(classes(*given)) or torch.zeros(())
    for epoch in (3, 4):
        orders.append([])
        trainer.samples_seen = 0
        trainer._run_epoch(epoch)
    assert len(orders[0]) == 40
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    expected = [(7, trainer.rank, epoch) for epoch in (3, 4)]
    if script == "ddp_torchrun.py":
        expected = [(*numbers, 0) for numbers in expected]
        trainer.samples_seen = 16
        trainer._run_epoch(4)
        assert seeds.pop() == (7, 1, 4, 16)
    assert seeds == expected, f"--seed in {script}"


@every_script
def test_loading_data_draws_nothing_from_the_models_numbers(make, script):
    """A resumed run starts its loader's workers anew, where an unstopped run does not."""
    _, trainer = make(script)
    before = torch.get_rng_state()
    assert len(list(trainer.train_data)) == 2 and len(list(trainer.test_data)) == 1
    assert torch.equal(torch.get_rng_state(), before)


class Noise(UserList):
    """Samples that are random augmentation and nothing else."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(()), 0


def inputs(batches: list | torch.Tensor) -> list[float]:
    """The same for a data set whose inputs are numbers."""
    source = torch.cat([pair[0] for pair in batches]) if isinstance(batches, list) else batches
    return source.tolist()


@pytest.mark.parametrize(
    ("script", "starts"),
    [
        *((script, ((0, 0), (0, 1))) for script in SCRIPTS[:2]),
        *((script, ((0, 0), (1, 0), (1, 1))) for script in SCRIPTS[2:]),
    ],
)
def test_each_ranks_loader_workers_draw_numbers_of_their_own(make, monkeypatch, script, starts):
    """At the starts of these ranks in these epochs, the last one as in a resumed run."""
    drawn = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for rank, epoch in starts:
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        module, trainer = make(script, "--model", "mlp", "--num-workers", 1)
        data = Noise(range(4))
        sampler = trainer.train_data.sampler
        given = {} if script in SCRIPTS[2:] else {"generator": sampler.generator}
        sampler = type(sampler)(data, **given)
        trainer.train_data = module.prepare_dataloader(data, 2, sampler, trainer.args)
        trainer._run_batch = lambda first, _: drawn.extend(inputs(first)) or torch.zeros(())
        trainer._run_epoch(epoch)
    assert len({*drawn}) == (6 if script in SCRIPTS[2:] else 8)
