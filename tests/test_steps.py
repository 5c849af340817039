"""What a step, an epoch and an evaluation compute, and on what. In the tests' process."""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.files import load
from helpers.jobs import SCRIPTS
from helpers.parts import (
    CPU,
    Made,
    every_ddp_script,
    every_script,
    every_torchrun_script,
    inner,
    made,
    two_devices,
)

from common.data import DataError, make_digits


@every_script
def test_the_optimizer_has_the_parameters_that_are_on_the_device(parse, monkeypatch, script):
    """Where torch makes new ones for the device, as for "meta", the order matters."""
    module, args = parse(script)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    objs = (make_digits(10, 0),) if script == "ddp_spawn.py" else ()
    *_, model, optimizer, _ = module.load_train_objs(args, *objs, torch.device("meta"))
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
def test_batchnorm_of_single_samples_is_refused(make, script):
    make(script, "--model", "resnet18", "--batch-size", 2)
    with pytest.raises(DataError, match="BatchNorm needs 2 samples"):
        make(script, "--model", "resnet18", "--batch-size", 1)
    if script in SCRIPTS[3:]:  # 13 or 14 samples a step, in eight parts
        with pytest.raises(DataError, match="BatchNorm needs 2 samples"):
            make(script, "--model", "resnet18", "--batch-size", 2, "--accumulate", 8)


@every_script
def test_workers_are_forked_on_linux_and_made_anew_in_each_epoch(parse, script):
    module, _ = parse(script)
    loader = module.prepare_dataloader([0], [[0]], CPU, 2)
    if sys.platform == "linux":
        assert loader.multiprocessing_context.Process.__name__ == "ForkedWorker"
        assert loader.multiprocessing_context.get_start_method() == "fork"
    assert loader.num_workers == 2 and not loader.persistent_workers  # or their seed would stay


@every_script
def test_each_epoch_has_its_order_and_may_begin_in_the_middle(make, capsys, script):
    _, trainer = make(script, "--model", "mlp", "--batch-size", 8, "--seed", 7)
    sampler, seeds = trainer.train_data.sampler, set()
    for epoch in (3, 4):
        trainer.samples_seen = 16
        trainer._run_epoch(epoch)
        assert (sampler.epoch, sampler.start, trainer.samples_seen) == (epoch, 16, 40)
        assert f"Epoch {epoch} | Batchsize: 8 | Steps: 3\n" in capsys.readouterr().out
        seeds.add(trainer.train_data.generator.initial_seed())  # of the loader's workers
    assert sampler.seed == 7 and len(seeds) == 2


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
    _, trainer = make(script, "--model", "mlp", "--batch-size", 20, "--log-interval", 2)

    def all_reduce(tensor, op=None):
        if tensor.is_floating_point():
            tensor.fill_(5)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    trainer.train(1)
    text = capsys.readouterr().out
    assert "Epoch 0 | Step 2 | Loss: 0.250000\n" in text
    assert "Train loss: 0.1250 | Test loss: 0.5000 | Accuracy: 5/10 (50.00%)" in text
    assert load(Path("checkpoint.pt"))["loss_sum"] == 5


@every_ddp_script
def test_all_ranks_are_evaluated_with_the_buffers_of_rank_0(make, monkeypatch, script):
    _, trainer = make(script)
    inner(trainer).register_buffer("statistics", torch.zeros(2))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.fill_(7 + src))
    trainer._evaluate()
    assert inner(trainer).statistics.tolist() == [7, 7]


@every_ddp_script
def test_ddp_has_its_order_of_summation_before_training(make, script):
    _, trainer = make(script)
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())


@every_ddp_script
def test_on_a_cpu_up_to_25_mib_of_gradients_are_one_all_reduce(make, script):
    for model, buckets in (("mlp", 1), ("resnet18", 2)):  # 3 and 45 MB
        _, trainer = make(script, "--model", model)
        trainer._run_epoch(0)
        assert trainer.model._get_ddp_logging_data()["num_buckets_reduced"] == buckets


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


@every_ddp_script
def test_any_model_can_settle_its_buckets(make, script):
    _, trainer = make(script)
    model = Aside()
    trainer.model = torch.nn.parallel.DistributedDataParallel(model)
    trainer._settle_buckets()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 5 and all((parameter.grad == 1).all() for parameter in trained)
    for _ in range(2):  # DDP complains in the second pass of what the first has left out
        outputs = trainer.model(torch.ones(2, 4), torch.ones(2, 4))
        assert {*outputs} == {"logits", "aside"}
        (outputs["logits"].sum() + outputs["aside"].sum()).backward()


@every_ddp_script
def test_a_model_with_a_forward_of_its_own_keeps_it(make, script):
    """As torch.compile(model) has one, and who patches a model in place."""
    _, trainer = make(script)
    model = torch.nn.Linear(2, 3)
    own = model.forward = lambda inputs: inputs.sum() * model.weight.sum()
    trainer.model = torch.nn.parallel.DistributedDataParallel(model)
    trainer._settle_buckets()
    assert model.forward is own and (model.weight.grad == 1).all()


def test_data_parallel_has_the_generators_of_all_its_devices(make, monkeypatch):
    module, _ = make("data_parallel.py")
    seeded, states = [], []
    monkeypatch.setattr(torch.nn.DataParallel, "__init__", two_devices)
    monkeypatch.setattr(module, "set_seed", lambda *_, devices=(): seeded.append(devices))
    monkeypatch.setattr(module, "get_rng_state", lambda *devices: states.append(devices))
    monkeypatch.setattr(module, "set_rng_state", lambda _, *devices: states.append(devices))
    _, trainer = make("data_parallel.py")
    trainer._save_snapshot()
    make("data_parallel.py", "--resume")
    both = (torch.device("cpu", 0), torch.device("cpu", 1))
    assert seeded[-1] == [*both] and states == [both, both]


@every_torchrun_script
def test_amp_in_training_and_in_evaluation(make, script):
    _, trainer = make(script, "--amp", "bf16", "--model", "mlp")
    types = []
    inner(trainer).register_forward_hook(lambda _, __, output: types.append(output.dtype))
    trainer._run_epoch(0)
    trainer._evaluate()
    assert types == [torch.bfloat16] * 3
    assert {value.dtype for value in inner(trainer).state_dict().values()} == {torch.float32}


@every_torchrun_script
def test_compile_leaves_the_names_of_the_weights(make, monkeypatch, script):
    monkeypatch.setattr("shutil.which", lambda name: name)  # nothing is compiled before it runs
    _, trainer = make(script, "--compile", "--model", "mlp")
    assert inner(trainer)._compiled_call_impl is not None
    assert next(iter(inner(trainer).state_dict())).startswith("layers.")


@every_torchrun_script
@pytest.mark.parametrize("share", [0, 1, 3, 7, 8])
def test_every_rank_takes_as_many_micro_batches(make, script, share):
    """SyncBatchNorm and no_sync need it, also where an epoch's shares are uneven."""
    _, trainer = make(script, "--batch-size", 2, "--accumulate", 4, "--model", "mlp")
    sizes = []
    inner(trainer).register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    source, targets = make_digits(10, 0).__getitems__(range(share))
    trainer._run_batch(source, targets, 8)
    assert len(sizes) == 4 and sum(sizes) == share and max(sizes) - min(sizes) <= 1


@every_ddp_script
@pytest.mark.parametrize("together", [False, True])
def test_a_rank_of_three_gets_its_shares_its_seed_and_its_smallest_batch(
    parse, monkeypatch, script, together
):
    """With SyncBatchNorm, batches are normalised together."""
    accumulate = 2 if script in SCRIPTS[3:] else 1
    options = ("--accumulate", 2) if accumulate == 2 else ()
    module, args = parse(script, "--batch-size", 5, "--test-batch-size", 2, "--seed", 7, *options)
    args.rank = args.local_rank = 1
    args.world_size = args.local_world_size = 3
    args.sync_bn = together
    data, seeds, smallest, seen = (make_digits(40, 0), make_digits(10, 1)), [], [], {}
    monkeypatch.setattr(module, "find_snapshot", lambda *_: None, raising=False)
    for name in ("barrier", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(module, "ddp_setup", lambda *_: CPU)
    monkeypatch.setattr(module, "load_dataset", lambda *_: data)
    monkeypatch.setattr(module, "set_seed", lambda *given: seeds.append(given))
    monkeypatch.setattr(module, "check_batch_norm", lambda _, count, __: smallest.append(count))
    monkeypatch.setattr(module, "Trainer", lambda *given: made(seen, *given))
    with pytest.raises(Made):
        module.main(*((1, *data, None, args) if script == SCRIPTS[2] else (args, None)))
    assert seeds == [(7,), (7, 1)]  # the same weights, and draws of its own
    _, train_data, test_data, *_ = seen["trainer"]
    sampler = train_data.sampler
    assert (sampler.num_replicas, sampler.rank, sampler.seed) == (3, 1, 7)
    assert sampler.global_batch == 5 * accumulate * 3
    assert list(test_data.sampler) == [[1, 4], [7]]
    if script != "ddp_spawn.py":  # 20 samples are the smaller of two global batches
        assert smallest == [20 // 3 // 2 * (3 if together else 1)]


def test_a_parent_looks_for_single_samples_of_batchnorm(parse, monkeypatch):
    module, args = parse("ddp_spawn.py", "--model", "resnet18", "--batch-size", 1)
    monkeypatch.setattr(module, "load_dataset", lambda *_: (make_digits(40, 0),) * 2)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(mp, "spawn", lambda *_, **__: pytest.fail("processes are started"))
    with pytest.raises(module.DataError, match="the smallest batch has 1"):
        module.spawn(args, torch.zeros((), dtype=torch.int32))


@every_script
def test_a_step_is_on_the_mean_over_the_global_batch(make, monkeypatch, script):
    """Of a rank that has 10 of 40 samples; the other one has the rest."""
    parts = 3 if script in SCRIPTS[3:] else 1
    options = ("--accumulate", 3) if parts == 3 else ()
    _, trainer = make(script, "--model", "mlp", *options)
    model, synced = inner(trainer), []
    trainer.world_size = 2 if script in SCRIPTS[2:] else 1
    model.register_forward_pre_hook(
        lambda *_: synced.append(getattr(trainer.model, "require_backward_grad_sync", True))
    )
    monkeypatch.setattr(trainer.optimizer, "step", lambda *_: None)
    source, targets = make_digits(10, 0).__getitems__(range(10))
    for _ in range(2):  # the second step knows nothing of the first one's gradients
        loss = trainer._run_batch(source, targets, 40)
    assert synced == [False] * (parts - 1) + [True] + [False] * (parts - 1) + [True]
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = torch.nn.functional.cross_entropy(model(source), targets, reduction="sum")
    (expected * trainer.world_size / 40).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-6)


@every_ddp_script
def test_each_batch_counts_as_much_as_all_ranks_have_of_it(make, script):
    """Of 13, 13 and 14 samples, two ranks have 7 and 6, or 7."""
    _, trainer = make(script, "--model", "mlp", "--batch-size", 7)
    sampler, counts = trainer.train_data.sampler, []
    sampler.num_replicas = trainer.world_size = 2
    sampler.global_batch = 14
    trainer._run_batch = lambda _, targets, count: (
        counts.append((len(targets), count)) or torch.zeros(())
    )
    trainer._run_epoch(0)
    assert counts == [(7, 13), (7, 13), (7, 14)] and trainer.samples_seen == 40


@every_ddp_script
def test_every_rank_starts_from_what_rank_0_sends(make, monkeypatch, script):
    _, trainer = make(script, "--model", "mlp")
    assert type(trainer.model) is torch.nn.parallel.DistributedDataParallel
    trainer.epoch = 3
    trainer._save_snapshot()
    snapshot = load(Path("checkpoint.pt"))

    def send(box, src=0):
        box[0] = snapshot
        if len(box) == 2:
            box[1] = {**box[1], "total_epochs": 9}

    monkeypatch.setattr(dist, "broadcast_object_list", send)
    _, trainer = make(script, "--model", "mlp", "--snapshot-path", "none.pt")
    assert trainer.epoch == 3 and make.total_epochs == (5 if script == "ddp_spawn.py" else 9)


@every_script
def test_workers_obey_their_rank_and_copies_follow_the_loader(make, script):
    module, trainer = make(script)
    assert trainer.train_data.worker_init_fn is module.obey_only_the_rank
    assert not trainer.pinned
    pinned = SimpleNamespace(pin_memory=True)
    objs = (inner(trainer), pinned, None, trainer.optimizer, trainer.schedule, CPU, None)
    assert module.Trainer(*objs, trainer.stop, trainer.args).pinned
