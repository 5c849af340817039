"""Randomness needs no state: what is drawn is a function of seed, rank, epoch and sample."""

import random
from collections import UserList

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.jobs import SCRIPTS, every_script
from torch.utils.data import random_split

from common.data import make_digits
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


@every_script
def test_each_epoch_has_its_order_and_its_random_numbers(make, monkeypatch, script):
    """ddp_torchrun.py may begin in mid-epoch, so it has one number more."""
    module, trainer = make(script, "--model", "mlp", "--batch-size", 8, "--seed", 7)
    trainer.rank, seeds, orders = 1 if script in SCRIPTS[2:] else 0, [], []
    monkeypatch.setattr(module, "set_seed", lambda *numbers: seeds.append(numbers))
    loss = torch.zeros(())
    trainer._run_batch = lambda _, targets, *more: orders[-1].extend(targets.tolist()) or loss
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
def test_a_random_split_is_the_same_on_all_ranks_and_after_a_resume(parse, monkeypatch, script):
    """And another with another seed, whatever has been drawn before."""
    data, splits = make_digits(40, 0), []

    def load_dataset(*_: object) -> tuple:
        random.shuffle(numbers := [*range(40)])
        train, test = random_split(data, (30, 10))
        splits.append((train.indices, np.random.permutation(40).tolist(), numbers))
        return train, test

    for rank, *options in ((0,), (1,), (0, "--resume"), (0, "--seed", 7)):
        module, args = parse(script, *options)
        monkeypatch.setattr(module, "load_dataset", load_dataset)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        module.load_train_objs(args, torch.device("cpu"))
    assert splits[0] == splits[1] == splits[2]
    assert all(one != other for one, other in zip(splits[2], splits[3], strict=True))


class Noise(UserList):
    """Samples that are random augmentation and nothing else."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(()), 0


@pytest.mark.parametrize("script", SCRIPTS[2:4])
def test_each_ranks_loader_workers_draw_numbers_of_their_own(make, script):
    """At the starts of these ranks in these epochs, the last one as in a resumed run."""
    module, trainer = make(script, "--model", "mlp", "--num-workers", 1)
    sampler, data, drawn = trainer.train_data.sampler, Noise(range(40)), []
    trainer._run_batch = lambda source, *_: drawn.extend(source.tolist()) or torch.zeros(())
    for trainer.rank, epoch in ((0, 0), (1, 0), (1, 1)):
        trainer.samples_seen = 0
        trainer.train_data = module.prepare_dataloader(data, 20, sampler, trainer.args)
        trainer.train_data.multiprocessing_context = "forkserver"  # quicker than spawn
        trainer._run_epoch(epoch)
    assert len({*drawn}) == len(drawn) == 3 * 40
