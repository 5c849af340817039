"""Randomness needs no state: what is drawn is a function of seed, rank, epoch and sample."""

import random

import numpy as np
import torch
from helpers.jobs import every_form
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
    set_seed(-1)  # NumPy takes 32 bits only, and none below 0


@every_form
def test_each_epoch_has_its_order_and_its_random_numbers(do, monkeypatch, script):
    """And begins with the split and the weights of --seed. The rest of an epoch that
    ddp_torchrun.py resumes has the order of the whole one."""
    module, seeds, orders = do.module(script), [], []
    monkeypatch.setattr(module, "set_seed", lambda *numbers: seeds.append(numbers))

    def train_epoch(model: object, loader: torch.utils.data.DataLoader, *_: object) -> torch.Tensor:
        orders.append([index for batch in loader.batch_sampler for index in batch])
        return torch.zeros(())

    monkeypatch.setattr(module, "train_epoch", train_epoch)
    options = ("--model", "mlp", "--batch-size", 8, "--seed", 7)
    do(script, 2, *options)
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(40)] and orders[0] != orders[1]
    assert seeds == [(7,), (7, 0, 0), (7, 0, 1)], f"--seed in {script}"
    do(script, 2, *options[:-1], 70)
    assert orders[2] not in orders[:2]
    if script == "ddp_torchrun.py":
        snapshot = torch.load("checkpoint.pt")
        torch.save({**snapshot, "epoch": 1, "samples_seen": 16}, "checkpoint.pt")
        do(script, 2, *options[:-1], 70, "--resume")
        assert orders[4] == orders[3][16:]
        assert seeds[-2:] == [(70, 0, 1), (70, 0, 1, 16)]  # other dropout than at the start


@every_form
def test_a_random_split_is_the_same_on_all_ranks_and_after_a_resume(do, monkeypatch, script):
    """And another with another seed, whatever has been drawn before."""
    data, splits = make_digits(40, 0), []

    def load_dataset(*_: object) -> tuple:
        random.shuffle(numbers := [*range(40)])
        train, val = random_split(data, (30, 10))
        splits.append((train.indices, np.random.permutation(40).tolist(), numbers))
        return train, val

    monkeypatch.setattr(do.module(script), "load_dataset", load_dataset)
    for options in ((), ("--resume",), ("--seed", 7)):
        do(script, 1, "--model", "mlp", *options)
    assert splits[0] == splits[1]
    assert all(one != other for one, other in zip(splits[1], splits[2], strict=True))
