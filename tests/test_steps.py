"""What a step, an epoch and an evaluation compute, and on what; in the tests' process."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import every_ddp_script, every_form
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, DistributedSampler

from common.data import make_digits
from common.loader import loader_options

pytestmark = pytest.mark.numbers

TORCHRUN = "ddp_torchrun.py"
MLP = ("--model", "mlp")


@every_form
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # there is no accelerator
@pytest.mark.parametrize("type", ["cuda", "mps"])
def test_copies_are_waited_for_unless_memory_is_pinned(do, monkeypatch, script, type):
    """From memory that is not pinned, MPS would copy garbage (pytorch#139550)."""
    seen, to = set(), torch.Tensor.to

    def traced(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.add(kwargs.get("non_blocking"))
        return to(tensor, *args, **kwargs)

    options = loader_options(type, 0)
    monkeypatch.setattr(do.module(script), "loader_options", lambda *_: options)
    monkeypatch.setattr(torch.Tensor, "to", traced)
    do(script, 1, *MLP)
    assert seen - {None} == {type == "cuda"}


@every_form
def test_evaluation_has_a_mode_of_its_own_and_leaves_the_model_in_training_mode(
    do, monkeypatch, script
):
    """Also where somebody calls it within an epoch."""
    module, modes, build_model = do.module(script), [], do.module(script).build_model

    def build(*given: object) -> torch.nn.Module:
        model = build_model(*given)
        model.register_forward_pre_hook(lambda model, _: modes.append(model.training))
        return model

    monkeypatch.setattr(module, "build_model", build)
    job = do(script, 2, "--batch-size", 16)
    assert modes == [True, True, True, False] * 2
    module.evaluate(job.model.train(), job.passes[0][1], torch.device("cpu"))
    assert not modes[-1] and job.model.training and job.model.classifier[3].training


@every_ddp_script
def test_evaluation_is_with_the_buffers_of_rank_0_and_not_through_ddp(do, monkeypatch, script):
    """Ranks would wait in DDP's forward for one that has no batch."""
    module, seen = do.module(script), []
    build_model, evaluate = module.build_model, module.evaluate

    def build(*given: object) -> torch.nn.Module:
        model = build_model(*given)
        model.register_buffer("statistics", torch.zeros(2))
        return model

    def look(model: torch.nn.Module, *given: object) -> torch.Tensor:
        seen.append((type(model).__name__, model.statistics.tolist()))
        return evaluate(model, *given)

    monkeypatch.setattr(module, "build_model", build)
    monkeypatch.setattr(module, "evaluate", look)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.fill_(7 + src))
    do(script, 1, *MLP)
    assert seen == [("MLP", [7, 7])]


def test_gradients_are_sent_once_a_step(do, monkeypatch):
    """Also after micro-batches of 4, 4 and 4 samples, and of 4 at the end."""
    module, sent, steps, step = do.module(TORCHRUN), [], [], torch.optim.SGD.step

    def wrap(model: torch.nn.Module, **named: object) -> torch.nn.Module:
        model = torch.nn.parallel.DistributedDataParallel(model, **named)
        hook = lambda _, bucket: sent.append(bucket.index()) or allreduce_hook(None, bucket)  # noqa: E731
        model.register_comm_hook(None, hook)
        return model

    def stepping(optimizer: torch.optim.Optimizer, *given: object) -> object:
        steps.append(sorted(sent))
        sent.clear()
        return step(optimizer, *given)

    monkeypatch.setattr(module, "DDP", wrap)
    monkeypatch.setattr(torch.optim.SGD, "step", stepping)
    do(TORCHRUN, 1, *MLP, "--batch-size", 4, "--accumulate", 3)
    assert len(steps) == 4 and all(step == [*range(len(step))] != [] for step in steps), steps


@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_no_sample_is_lost_where_other_ranks_go_on_in_mid_epoch(do, monkeypatch, before):
    """Of 41 samples, those before the stop are the first of the epoch's order. The other ranks
    begin where these end, or less than one sample a rank before that."""
    shares = [DistributedSampler(range(41), before, rank, seed=42) for rank in range(before)]
    done, found = [*chain(*zip(*shares, strict=True))][: 5 * before], []

    def train_epoch(model: object, loader: DataLoader, *given: object) -> torch.Tensor:
        found.append((given[-1], [*loader.sampler]))
        return torch.zeros(())

    fakes = {"train_epoch": train_epoch, "load_snapshot": lambda *_: (0, len(done))}
    fakes["load_dataset"] = lambda *_: (make_digits(41, 0), [])
    for name in ("same_on_all_ranks", "save_snapshot", "log"):
        fakes[name] = lambda *_, **__: None
    for name, fake in fakes.items():
        monkeypatch.setattr(do.module(TORCHRUN), name, fake)
    for world_size in (1, 2, 3, 4):
        monkeypatch.setattr(dist, "get_world_size", lambda *_, size=world_size: size)
        found.clear()
        for rank in range(world_size):
            monkeypatch.setattr(dist, "get_rank", lambda *_, rank=rank: rank)
            do(TORCHRUN, 1, *MLP, "--resume")
        rest = [*chain(*(part for _, part in found))]
        assert {*done, *rest} == {*range(41)}
        assert {before for before, _ in found} == {len(done) // world_size}
        assert len(done) + len(rest) < 41 + 2 * world_size
