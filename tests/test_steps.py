"""What a step, an epoch and an evaluation compute, and on what; in the tests' process."""

from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers.files import load
from helpers.jobs import SCRIPTS, every_ddp_script, every_script, inner
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from common.data import make_digits

pytestmark = pytest.mark.numbers

DDP = SCRIPTS[2:]
TORCHRUN = "ddp_torchrun.py"


@every_script
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # there is no accelerator
@pytest.mark.parametrize("type", ["cuda", "xpu", "mps", "cpu"])
def test_copies_are_waited_for_unless_memory_is_pinned(make, monkeypatch, script, type):
    module, trainer = make(script)
    trainer.args.device, seen, to = type, set(), torch.Tensor.to
    data = module.prepare_dataloader([0], 1, [0], trainer.args)
    model, device = inner(trainer), torch.device("cpu")
    made = module.Trainer(model, data, data, trainer.optimizer, None, device, trainer.args)
    trainer.pin_memory = made.pin_memory

    def traced(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.add(kwargs.get("non_blocking"))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", traced)
    trainer._run_epoch(0)
    trainer._evaluate()
    assert seen - {None} == {type in ("cuda", "xpu")}


@every_script
def test_dropout_in_training_and_all_units_in_evaluation(make, script):
    _, trainer = make(script)
    modes = []
    inner(trainer).register_forward_pre_hook(lambda model, _: modes.append(model.training))
    trainer.train(2)
    assert modes == [True, True, False] * 2


@every_ddp_script
def test_evaluation_is_with_the_buffers_of_rank_0_and_not_through_ddp(make, monkeypatch, script):
    """Ranks would wait in DDP's first forward for one that has no batch."""
    _, trainer = make(script)
    statistics = torch.zeros(2)
    inner(trainer).register_buffer("statistics", statistics)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.fill_(7 + src))
    trainer.model.forward = Mock(side_effect=AssertionError(f"{script} evaluates through DDP"))
    trainer._evaluate()
    assert statistics.tolist() == [7, 7]


@every_script
def test_a_step_is_on_the_mean_over_the_batch(make, monkeypatch, script):
    """DDP sends the gradients once, also after micro-batches of 4, 4 and 2."""
    _, trainer = make(script, "--model", "mlp", "--batch-size", 4)
    model, sent, gradients = inner(trainer), [], []
    weights = [*model.parameters()]
    step = lambda: gradients.append([weight.grad.clone() for weight in weights])  # noqa: E731
    monkeypatch.setattr(trainer.optimizer, "step", step)
    if script in DDP:
        trainer.model.register_comm_hook(
            None, lambda _, bucket: sent.append(bucket.index()) or allreduce_hook(None, bucket)
        )
    source, targets = make_digits(10, 0).__getitems__(range(10))
    shares, given = [1.0], [(source, targets)]
    if script == TORCHRUN:
        shares, last = [0.4, 0.4, 0.2], [False, False, True]
        given = [*zip(source.split(4), targets.split(4), shares, last, strict=True)]
    mean = torch.nn.functional.cross_entropy(model(source), targets)
    expected = torch.autograd.grad(mean, weights)
    for _ in range(2):  # the second step knows nothing of the first one's gradients
        sent.clear()
        losses = [trainer._run_batch(*one).item() for one in given]
        loss = sum(loss * share for loss, share in zip(losses, shares, strict=True))
        assert loss == pytest.approx(mean.item())
        buckets = [*range(len(sent))]
        assert sorted(sent) == buckets and bool(sent) == (script in DDP), f"{script} sends {sent}"
    for found, again, gradient in zip(*gradients, expected, strict=True):
        assert torch.allclose(found, gradient, atol=1e-6) and torch.equal(again, found)


@pytest.mark.parametrize("count", [40, 41, 64])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_no_sample_is_lost_where_other_ranks_go_on_in_mid_epoch(make, monkeypatch, count, before):
    """The samples before the stop are the first of the epoch's order. The other ranks begin where
    these end, or less than one sample a rank before that."""
    module, trainer = make(TORCHRUN, "--model", "mlp")

    def shards(world_size: int, epoch: int, seen: int) -> list[list[int]]:
        lists = []
        for rank in range(world_size):
            sampler = module.ResumableSampler(range(count), world_size, rank, seed=7)
            sampler.set_epoch(epoch, seen)
            lists.append([*sampler])
            assert len(sampler) == len(lists[-1])
        return lists

    order = [*chain(*zip(*shards(before, 3, 0), strict=True))]
    trainer._save_snapshot()
    snapshot, trainer.model = {**load(Path("checkpoint.pt")), "epoch": 3}, inner(trainer)
    monkeypatch.setattr(torch, "load", lambda *_, **__: snapshot)
    for snapshot["samples_seen"] in range(0, len(order), 2 * before):
        seen = order[: snapshot["samples_seen"]]
        for trainer.world_size in (1, 2, 3, 4):
            trainer._load_snapshot()
            rest = [*chain(*shards(trainer.world_size, trainer.epoch, trainer.samples_seen))]
            assert {*seen, *rest} == {*range(count)} and rest[0] == order[trainer.samples_seen]
            assert len(seen) + len(rest) < count + 2 * trainer.world_size
