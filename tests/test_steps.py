"""What a step, an epoch and an evaluation compute, and on what; in the tests' process."""

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import SCRIPTS
from helpers.parts import every_ddp_script, every_script, inner

from common.data import make_digits

DDP = SCRIPTS[2:]
TORCHRUN = "ddp_torchrun.py"


@every_script
@pytest.mark.parametrize("type", ["cuda", "mps", "cpu"])
def test_copies_are_waited_for_unless_memory_is_pinned(make, monkeypatch, script, type):
    module, trainer = make(script)
    loader = module.prepare_dataloader([0], [[0]], torch.device(type), 0)
    assert loader.pin_memory == (type == "cuda")
    trainer.pinned, seen, to = type == "cuda", set(), torch.Tensor.to

    def traced(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.add(kwargs.get("non_blocking"))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", traced)
    trainer._run_epoch(0)
    trainer._evaluate()
    assert seen - {None} == {type == "cuda"}


@every_script
def test_dropout_in_training_and_all_units_in_evaluation(make, script):
    _, trainer = make(script)
    modes = []
    inner(trainer).register_forward_pre_hook(lambda module, _: modes.append(module.training))
    trainer._run_epoch(0)
    trainer._evaluate()
    trainer.samples_seen = 0
    trainer._run_epoch(1)
    assert modes == [True, True, False, True, True]


@every_ddp_script
def test_evaluation_is_with_the_buffers_of_rank_0_and_not_through_ddp(make, monkeypatch, script):
    """Ranks with one batch more than others would wait in DDP's forward for ever."""
    _, trainer = make(script)
    inner(trainer).register_buffer("statistics", torch.zeros(2))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.fill_(7 + src))
    passes = []
    trainer.model.register_forward_pre_hook(lambda *_: passes.append("DDP"))
    inner(trainer).register_forward_pre_hook(lambda *_: passes.append("model"))
    trainer._evaluate()
    assert inner(trainer).statistics.tolist() == [7, 7]
    assert passes == ["model"], f"{script} evaluates through DDP"


@every_script
def test_a_step_is_on_the_mean_over_the_global_batch(make, monkeypatch, script):
    """Of a rank that has 10 of 40 samples; the other one has the rest. DDP sends its gradients
    once, also with three micro-batches, of which two are under no_sync()."""
    parts = 3 if script == TORCHRUN else 1
    _, trainer = make(script, "--model", "mlp", *(("--accumulate", 3) if parts == 3 else ()))
    model, passes, sent = inner(trainer), [], []
    model.register_forward_pre_hook(lambda *_: passes.append("forward"))
    monkeypatch.setattr(trainer.optimizer, "step", lambda *_: None)
    if script in DDP:
        trainer.world_size = 2

        def all_reduce(_, bucket):  # DDP takes no other annotations than its own
            sent.append(bucket.index())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        trainer.model.register_comm_hook(None, all_reduce)
    source, targets = make_digits(10, 0).__getitems__(range(10))
    for step in (1, 2):  # the second one knows nothing of the first one's gradients
        loss = trainer._run_batch(source, targets, *([40] if script in DDP else []))
        assert len(passes) == step * parts
        assert len(sent) == step * (script in DDP), f"{script} sends gradients without need"
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = torch.nn.functional.cross_entropy(model(source), targets, reduction="sum")
    (expected * 2 / 40 if script in DDP else expected / 10).backward()
    assert loss.item() == pytest.approx(expected.item() / (1 if script == TORCHRUN else 10))
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-6)


def test_every_rank_takes_as_many_micro_batches(make):
    """SyncBatchNorm and no_sync need it, also where an epoch's shares are uneven."""
    _, trainer = make(TORCHRUN, "--accumulate", 4, "--model", "mlp")
    trainer.world_size, sizes = 2, []
    inner(trainer).register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    for size, shares, parts in ((13, (6, 7), 4), (7, (3, 4), 3), (2, (1, 1), 1)):
        for share in shares:
            sizes.clear()
            trainer._run_batch(*make_digits(10, 0).__getitems__(range(share)), size)
            assert len(sizes) == parts and sum(sizes) == share
            assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1


def test_ddp_has_its_order_of_summation_before_training(make):
    """So that a resumed run sums in the same order, with three ranks or more, too."""
    _, trainer = make(TORCHRUN)
    assert all((parameter.grad == 1).all() for parameter in trainer.model.parameters())
