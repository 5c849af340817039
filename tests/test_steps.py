"""What a step, an epoch and an evaluation compute, on what and with what; in the tests' process."""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import epochs, every_ddp_script, every_script
from torch import nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.numbers

MLP = ("--model", "mlp")


@every_script
def test_batches_are_copied_without_waiting_and_multiplied_in_tf32(do, monkeypatch, script):
    class Batch(SimpleNamespace):
        def to(self, device: torch.device, **named: object) -> torch.Tensor:
            copies.append((device.type, named))
            return self.tensor

    copies, model = [], nn.Linear(1, 2)
    loader = [(Batch(tensor=torch.ones(3, 1)), Batch(tensor=torch.tensor([0, 1, 1])))]
    torch.set_float32_matmul_precision("highest")
    module = do(script, 1, *MLP).module
    assert torch.get_float32_matmul_precision() == "high"
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    optimizer, device = torch.optim.SGD(model.parameters()), torch.device("cpu")
    module.train_epoch(model, loader, optimizer, device)
    module.evaluate(model, loader, device)
    assert copies == [("cpu", {"non_blocking": True})] * 4


@every_script
def test_each_epoch_has_its_order_and_its_random_numbers(do, monkeypatch, script):
    """The order is the same in all scripts. The weights and a split of the data are seeded, too."""
    module, seeds, orders = do.module(script), [], []

    def train_epoch(model: object, loader: DataLoader, *_: object) -> torch.Tensor:
        orders.append([*loader.sampler])
        return torch.zeros(())

    monkeypatch.setattr(module, "set_seed", lambda *numbers: seeds.append(numbers))
    monkeypatch.setattr(module, "train_epoch", train_epoch)
    do(script, 2, *MLP, "--seed", 7)
    for epoch, order in enumerate(orders):
        generator = torch.Generator().manual_seed(7 + epoch)
        assert order == torch.randperm(40, generator=generator).tolist()
    rank = () if script in ("single_gpu.py", "data_parallel.py") else (0,)
    assert seeds == [(7,), (7, *rank, 0), (7, *rank, 1)]


@every_script
def test_the_sums_of_an_epoch_and_the_modes_of_the_model(do, monkeypatch, script):
    """A learning rate of 0 leaves the weights as they are, so all can be computed afterwards. Of 40
    samples the last batch is short."""
    module, modes = do.module(script), []
    build_model = module.build_model

    def build(*given: object) -> nn.Module:
        model = build_model(*given)
        model.register_forward_pre_hook(lambda model, _: modes.append(model.training))
        return model

    monkeypatch.setattr(module, "build_model", build)
    job = do(script, 2, *MLP, "--batch-size", 16, "--lr", 0)
    assert modes == [True, True, True, False] * 2
    inputs, targets = zip(*[job.passes[0][1].dataset[index] for index in range(40)], strict=True)
    loss = nn.functional.cross_entropy(job.model(torch.stack(inputs)), torch.stack(targets))
    assert epochs(job.text)[1]["train_loss"] == pytest.approx(loss.item(), abs=6e-5)


def test_data_parallel_splits_training_and_evaluation(do, monkeypatch):
    """As on two GPUs, but that the second half is computed by the model itself, and not a copy."""
    parts = []

    def forward(wrapped: nn.DataParallel, inputs: torch.Tensor) -> torch.Tensor:
        parts.append(len(inputs))
        return torch.cat([wrapped.module(half) for half in inputs.chunk(2)])

    monkeypatch.setattr(nn.DataParallel, "forward", forward)
    do("data_parallel.py", 2, *MLP)
    assert parts == [32, 8, 10] * 2


@every_ddp_script
def test_evaluation_is_with_the_buffers_of_rank_0_and_not_through_ddp(do, monkeypatch, script):
    """Ranks would wait in DDP's forward for one that has no batch."""
    module, seen = do.module(script), []
    build_model = module.build_model

    def build(*given: object) -> nn.Module:
        model = build_model(*given)
        model.register_buffer("statistics", torch.zeros(2))
        return model

    def evaluate(model: nn.Module, *_: object) -> torch.Tensor:
        seen.append((type(model).__name__, model.statistics.tolist()))
        return torch.zeros(2)

    monkeypatch.setattr(module, "build_model", build)
    monkeypatch.setattr(module, "evaluate", evaluate)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.fill_(7 + src))
    do(script, 1, *MLP)
    assert seen == [("MLP", [7, 7])]


@every_ddp_script
def test_ddp_is_freed_before_its_group_ends(do, monkeypatch, script):
    module, wrap, destroy = do.module(script), do.module(script).DDP, dist.destroy_process_group
    held, ended = [], []

    def end() -> None:
        do.job.passes.clear()  # which hold it, too
        ended.append(held[0]() is None)
        destroy()

    def look(model: nn.Module, **named: object) -> nn.Module:
        model = wrap(model, **named)
        held.append(weakref.ref(model))
        return model

    monkeypatch.setattr(module, "DDP", look)
    monkeypatch.setattr(dist, "destroy_process_group", end)
    do(script, 1, *MLP)
    assert ended == [True]
