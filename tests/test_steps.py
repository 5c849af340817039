"""What a step, an epoch and an evaluation compute, and on what. In the tests' process."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import SCRIPTS
from helpers.parts import CPU, Made, every_ddp_script, every_script, inner, made, two_devices

from common.data import make_digits

TORCHRUN = "ddp_torchrun.py"


@every_script
def test_the_optimizer_has_the_parameters_that_are_on_the_device(parse, monkeypatch, script):
    """Where torch makes new ones for the device, as for "meta", the order matters."""
    module, args = parse(script)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module, "set_seed", lambda *_: None)  # "meta" has no generator
    monkeypatch.setenv("LOCAL_RANK", "0")
    given = {"ddp_spawn.py": (make_digits(10, 0),), "multinode.py": (0,)}.get(script, ())
    *_, model, optimizer, _ = module.load_train_objs(args, *given, torch.device("meta"))
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [*map(id, trained)] == [*map(id, model.parameters())]
    assert {parameter.device.type for parameter in trained} == {"meta"}


@every_script
@pytest.mark.parametrize("type", ["cuda", "mps", "cpu"])
def test_copies_are_waited_for_unless_memory_is_pinned(make, parse, monkeypatch, script, type):
    module, _ = parse(script)
    loader = module.prepare_dataloader([0], [[0]], torch.device(type), 0)
    assert loader.pin_memory == (type == "cuda")
    _, trainer = make(script)
    trainer.pinned, seen, to = type == "cuda", set(), torch.Tensor.to

    def traced(tensor, *args, **kwargs):
        seen.add(kwargs.get("non_blocking"))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", traced)
    trainer._run_epoch(0)
    trainer._evaluate()
    assert (seen - {None}) == {type == "cuda"}


@every_script
def test_each_epoch_has_its_order_and_its_random_numbers(make, monkeypatch, capsys, script):
    module, trainer = make(script, "--model", "mlp", "--batch-size", 8, "--seed", 7)
    sampler, seeds, orders = trainer.train_data.batch_sampler, [], []
    monkeypatch.setattr(module, "set_seed", lambda *numbers: seeds.append(numbers))
    run_batch = trainer._run_batch
    trainer._run_batch = lambda *batch: orders[-1].extend(batch[1].tolist()) or run_batch(*batch)
    for epoch in (3, 4):
        orders.append([])
        trainer.samples_seen = 0
        trainer._run_epoch(epoch)
        assert (sampler.epoch, sampler.start) == (epoch, 0)
        assert f"Epoch {epoch} | Batchsize: 8 | Steps: 5\n" in capsys.readouterr().out
    assert sampler.seed == 7 and len(orders[0]) == 40
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    starts = [(trainer.device, 7, 0, epoch) for epoch in (3, 4)]
    if script == TORCHRUN:
        starts = [(*start, seen) for start in starts for seen in range(0, 41, 8)]
    assert seeds == starts


def test_an_epoch_goes_on_in_the_middle(make, capsys):
    _, trainer = make(TORCHRUN, "--model", "mlp", "--batch-size", 8)
    trainer.samples_seen = 16
    trainer._run_epoch(3)
    sampler = trainer.train_data.batch_sampler
    assert (sampler.epoch, sampler.start, trainer.samples_seen) == (3, 16, 40)
    assert "Epoch 3 | Batchsize: 8 | Steps: 3\n" in capsys.readouterr().out


@every_script
def test_a_seed_gives_the_weights(make, script):
    weights = []
    for seed in (7, 7, 8):
        torch.seed()
        trainer = make(script, "--model", "mlp", "--seed", seed)[1]
        weights.append(next(trainer.model.parameters()).detach())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


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


@every_script
def test_loading_data_draws_nothing_from_the_models_numbers(make, script):
    _, trainer = make(script)
    before = torch.get_rng_state()
    assert len(list(trainer.train_data)) == 2 and len(list(trainer.test_data)) == 1
    assert torch.equal(torch.get_rng_state(), before)


@every_ddp_script
def test_losses_and_accuracy_are_those_of_all_ranks(make, monkeypatch, capsys, script):
    _, trainer = make(script, "--model", "mlp", "--batch-size", 20)

    def all_reduce(tensor, op=None):
        if tensor.is_floating_point():
            tensor.fill_(5)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    trainer.train(1)
    text = capsys.readouterr().out
    assert "Train loss: 0.1250 | Test loss: 0.5000 | Accuracy: 5/10 (50.00%)" in text


@every_ddp_script
def test_all_ranks_are_evaluated_with_the_buffers_of_rank_0(make, monkeypatch, script):
    _, trainer = make(script)
    inner(trainer).register_buffer("statistics", torch.zeros(2))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.fill_(7 + src))
    trainer._evaluate()
    assert inner(trainer).statistics.tolist() == [7, 7]


def test_ddp_has_its_order_of_summation_before_training(make):
    _, trainer = make(TORCHRUN)
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())


class Aside(torch.nn.Module):
    """An auxiliary head that is used in training alone, frozen weights, and a pair of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aside = (torch.nn.Linear(4, 4) for _ in range(3))
        self.body.bias.requires_grad_(False)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(one * other)
        outputs = {"logits": self.head(hidden)}
        if self.training:
            outputs["aside"] = self.aside(hidden)
        return outputs


def test_any_model_can_settle_its_buckets(make):
    _, trainer = make(TORCHRUN)
    model = Aside()
    trainer.model = torch.nn.parallel.DistributedDataParallel(model)
    trainer._settle_buckets()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 5 and all((parameter.grad == 1).all() for parameter in trained)
    for _ in range(2):  # DDP complains in the second pass of what the first has left out
        outputs = trainer.model(torch.ones(2, 4), torch.ones(2, 4))
        assert {*outputs} == {"logits", "aside"}
        (outputs["logits"].sum() + outputs["aside"].sum()).backward()


def test_a_model_with_a_forward_of_its_own_keeps_it(make):
    """As torch.compile(model) has one, and who patches a model in place."""
    _, trainer = make(TORCHRUN)
    model = torch.nn.Linear(2, 3)
    own = model.forward = lambda inputs: inputs.sum() * model.weight.sum()
    trainer.model = torch.nn.parallel.DistributedDataParallel(model)
    trainer._settle_buckets()
    assert model.forward is own and (model.weight.grad == 1).all()


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


def test_amp_in_training_and_in_evaluation(make):
    _, trainer = make(TORCHRUN, "--amp", "bf16", "--model", "mlp")
    types = []
    inner(trainer).register_forward_hook(lambda _, __, output: types.append(output.dtype))
    trainer._run_epoch(0)
    trainer._evaluate()
    assert types == [torch.bfloat16] * 3
    assert {value.dtype for value in inner(trainer).state_dict().values()} == {torch.float32}


def test_compile_leaves_the_names_of_the_weights(make):
    _, trainer = make(TORCHRUN, "--compile", "--model", "mlp")  # compiled when it first runs
    assert inner(trainer)._compiled_call_impl is not None
    assert next(iter(inner(trainer).state_dict())).startswith("layers.")


@pytest.mark.parametrize(
    ("size", "shares", "parts"), [(13, (6, 7), 4), (7, (3, 4), 3), (2, (1, 1), 1)]
)
def test_every_rank_takes_as_many_micro_batches(make, size, shares, parts):
    """SyncBatchNorm and no_sync need it, also where an epoch's shares are uneven."""
    _, trainer = make(TORCHRUN, "--accumulate", 4, "--model", "mlp")
    trainer.world_size, sizes = 2, []
    inner(trainer).register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    for share in shares:
        sizes.clear()
        source, targets = make_digits(10, 0).__getitems__(range(share))
        trainer._run_batch(source, targets, size)
        assert len(sizes) == parts and sum(sizes) == share
        assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1


@every_ddp_script
def test_a_rank_of_three_gets_its_shares_and_its_seed(parse, make, monkeypatch, script):
    accumulate = 2 if script == TORCHRUN else 1
    options = ("--accumulate", 2) if script == TORCHRUN else ()
    make(script)  # what main() does besides is out of the way
    module, args = parse(script, "--batch-size", 5, "--test-batch-size", 2, "--seed", 7, *options)
    data, seeds, seen = (make_digits(40, 0), make_digits(10, 1)), [], {}
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(module, "ddp_setup", lambda *_: CPU)
    monkeypatch.setattr(module, "load_dataset", lambda *_: data)
    monkeypatch.setattr(module, "set_seed", lambda *given: seeds.append(given))
    monkeypatch.setattr(module, "Trainer", lambda *given: made(seen, *given))
    args.first_local_rank = 0
    given = {"ddp_spawn.py": (1, *data), "multinode.py": (1,)}.get(script, ())
    with pytest.raises(Made):
        module.main(*given, args)
    assert seeds == [(CPU, 7), (CPU, 7, 1)]  # the same weights, and draws of its own
    _, train_data, test_data, *_ = seen["trainer"]
    sampler = train_data.batch_sampler
    assert (sampler.world_size, sampler.rank, sampler.seed) == (3, 1, 7)
    assert sampler.global_batch == 5 * accumulate * 3
    assert list(test_data.batch_sampler) == [[1, 4], [7]]


@every_script
def test_a_step_is_on_the_mean_over_the_global_batch(make, monkeypatch, script):
    """Of a rank that has 10 of 40 samples; the other one has the rest."""
    parts = 3 if script == TORCHRUN else 1
    options = ("--accumulate", 3) if parts == 3 else ()
    ddp = script in SCRIPTS[2:]
    _, trainer = make(script, "--model", "mlp", *options)
    model, synced = inner(trainer), []
    trainer.world_size = 2
    model.register_forward_pre_hook(
        lambda *_: synced.append(getattr(trainer.model, "require_backward_grad_sync", True))
    )
    monkeypatch.setattr(trainer.optimizer, "step", lambda *_: None)
    source, targets = make_digits(10, 0).__getitems__(range(10))
    for _ in range(2):  # the second step knows nothing of the first one's gradients
        loss = trainer._run_batch(source, targets, *([40] if ddp else []))
    assert synced == 2 * ([False] * (parts - 1) + [True])
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = torch.nn.functional.cross_entropy(model(source), targets, reduction="sum")
    (expected * 2 / 40 if ddp else expected / 10).backward()
    assert loss.item() == pytest.approx(expected.item() / (1 if script == TORCHRUN else 10))
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-6)


@every_ddp_script
def test_each_batch_counts_as_much_as_all_ranks_have_of_it(make, script):
    """Of 13, 13 and 14 samples, two ranks have 7 and 6, or 7."""
    _, trainer = make(script, "--model", "mlp", "--batch-size", 7)
    sampler, counts = trainer.train_data.batch_sampler, []
    sampler.world_size = trainer.world_size = 2
    sampler.global_batch = 14
    trainer._run_batch = lambda _, targets, size: (
        counts.append((len(targets), size)) or torch.zeros(())
    )
    trainer._run_epoch(0)
    assert counts == [(7, 13), (7, 13), (7, 14)]
    assert script != TORCHRUN or trainer.samples_seen == 40
