"""docs/recipes.md: each change fits the script, and does what the page says of it."""

import re
import runpy
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.files import load, patched, same_bytes
from helpers.jobs import ROOT, SCRIPTS, Job, command, epochs
from helpers.ranks import train
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = dict(re.findall(r"```diff (\w+)\n(.*?)```", PAGE, re.S))
FOLDER = ROOT / "docs" / "recipes"
SMALL = ("--model", "mlp", "--batch-size", 8, "--lr", 0.1)  # five steps an epoch


@pytest.fixture
def apply(make, monkeypatch, tmp_path):
    """apply(recipe, *arguments) -> as make(), of a script with this recipe, in this process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def apply(
        name: str | None,
        *arguments: object,
        script: str = "ddp_torchrun.py",
        edit: Callable[[str], str] = str,
    ) -> tuple:
        text = (ROOT / script).read_text()
        if name:
            text = patched(text, edit(RECIPES[name]))
        (tmp_path / script).write_text(text)
        monkeypatch.setitem(sys.modules, script[:-3], ModuleType("forgotten after the test"))
        del sys.modules[script[:-3]]
        return make(script, *arguments)

    return apply


def test_every_recipe_is_applied_here():
    code = Path(__file__).read_text()
    assert [name for name in RECIPES if f'"{name}"' not in code] == []
    assert [path.name for path in FOLDER.glob("*.py") if f'"{path.name}"' not in code] == []


def test_images_from_disk(apply, capsys, tmp_path):
    for part, count in (("train", 8), ("val", 3)):
        for name in ("red", "green", "blue"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for number in range(count):
                picture = Image.new("RGB", (30, 24), name)
                picture.save(tmp_path / "photos" / part / name / f"{number}.png")
    options = (4, "--data-dir", "photos", "--batch-size", 8)
    _, trainer = apply("images", *options, edit=lambda recipe: recipe.replace("= 224", "= 32"))
    trainer.train(4)
    first, *_, last = epochs(capsys.readouterr().out)
    assert last["train_loss"] < first["train_loss"] / 2 and last["total"] == 9
    assert load(tmp_path / "checkpoint.pt")["model"]["fc.weight"].shape == (3, 512)


def test_text_of_unequal_length(apply, tmp_path):
    """One class has more of the letter a; padding changes no output."""
    lines = [f"{n % 2}\t{'ab'[n % 2] * (3 + n % 7)}{'c' * (n % 5)}\n" for n in range(40)]
    (tmp_path / "train.txt").write_text("".join(lines))
    (tmp_path / "val.txt").write_text("".join(lines[:9]))
    module, trainer = apply("text", 3, "--data-dir", ".", "--batch-size", 8, "--lr", 1)
    trainer.train(3)
    assert trainer._evaluate()[1] == 9
    texts, _ = module.pad(trainer.test_data.dataset)
    assert (texts == 0).any()
    model = trainer.model.module
    each = [model(text[None]) for text, _ in trainer.test_data.dataset]
    assert torch.allclose(model(texts), torch.cat(each), atol=1e-6)


def test_warm_up_and_cosine_are_resumed_and_at_another_rate(apply, monkeypatch, tmp_path):
    _, trainer = apply("schedule", 3, *SMALL, "--snapshot-path", "whole.pt")
    rates = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: rates.append(trainer.optimizer.param_groups[0]["lr"])
    )
    trainer.train(3)
    assert rates[:6] == sorted(rates[:6]) and rates[0] < 0.002 and rates[5] == pytest.approx(0.1)
    assert rates[5:] == sorted(rates[5:], reverse=True) and len(rates) == 15
    module, trainer = apply("schedule", 3, *SMALL)
    trainer.optimizer.register_step_post_hook(lambda *_: setattr(module, "stop_requested", True))
    trainer.train(3)
    assert trainer.stopping
    stopped = load(tmp_path / "checkpoint.pt")
    assert stopped["epoch"] == 0 and stopped["samples_seen"] == 8
    apply("schedule", 3, *SMALL, "--resume")[1].train(3)
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    torch.save(stopped, tmp_path / "checkpoint.pt")
    monkeypatch.setattr(sys, "argv", ["", "checkpoint.pt", "0.2"])
    runpy.run_path(FOLDER / "change_lr.py")
    _, trainer = apply("schedule", 3, *SMALL[:-1], 0.2, "--resume")
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(2 * rates[1])
    trainer.train(2)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(2 * rates[10])


def test_clipping(apply):
    _, trainer = apply("clip", 1, *SMALL, "--momentum", 0, "--amp", "fp16")
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    start = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    trainer._run_batch(3 * torch.randn(8, 1, 28, 28), torch.zeros(8).long())
    moved = nn.utils.parameters_to_vector(trainer.model.parameters()).detach() - start
    assert moved.norm() == pytest.approx(0.1, rel=1e-2)  # the rate times max_norm


def test_both_optimizers_are_resumed(apply, tmp_path):
    apply("optimizers", 2, *SMALL, "--snapshot-path", "whole.pt")[1].train(2)
    _, trainer = apply("optimizers", 1, *SMALL)
    start = trainer.model.module.state_dict()
    start = {name: tensor.clone() for name, tensor in start.items()}
    trainer.train(1)
    for name, tensor in trainer.model.module.state_dict().items():
        assert not torch.equal(tensor, start[name]), name
    apply("optimizers", 2, *SMALL, "--resume")[1].train(2)
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


def test_checkpointing_computes_twice_what_it_does_not_keep(apply, tmp_path):
    """With dropout: the second pass draws the same units."""
    options = (1, "--batch-size", 8)
    passes = {}
    for name in (None, "checkpointing"):
        _, trainer = apply(name, *options, "--snapshot-path", f"{name}.pt")
        calls = []
        convolution = trainer.model.module.features[0]
        convolution.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        trainer._run_epoch(0)
        trainer._save_snapshot()
        passes[name] = len(calls)
    assert passes == {None: 5, "checkpointing": 10}
    assert same_bytes(load(tmp_path / "checkpointing.pt"), load(tmp_path / "None.pt"))


def test_gradients_in_bf16(apply):
    trainers = [apply(name, 1, *SMALL)[1] for name in (None, "bf16")]
    source, targets = torch.randn(8, 1, 28, 28), torch.arange(8)
    for trainer in trainers:
        trainer._run_batch(source, targets)
    plain, rounded = (list(trainer.model.parameters())[-1].grad for trainer in trainers)
    assert torch.equal(rounded, plain.bfloat16().float()) and not torch.equal(rounded, plain)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_has_a_tracker(apply, monkeypatch, rank):
    calls = []
    run = SimpleNamespace(
        log=lambda numbers, step: calls.append((step, *numbers)),
        finish=lambda: calls.append("finish"),
    )
    wandb = SimpleNamespace(init=lambda **given: calls.append(given["project"]) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: rank + 1)
    _, trainer = apply("tracker", 2, *SMALL)
    trainer.train(2)
    names = ("loss/train", "loss/test", "accuracy")
    expected = ["digits", "finish", (0, *names), (1, *names)]  # make() trains after main()
    assert calls == ([] if rank else expected)


def without_ranks(recipe: str) -> str:
    lines = r"\+( *)if self.rank == 0:\n((?:\+\1    .*\n)+)"
    return re.sub(lines, lambda found: found[2].replace("+    ", "+"), recipe)


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "ddp_torchrun.py"])
def test_tensorboard_in_the_other_scripts(apply, capsys, script):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    edit = without_ranks if script in ("single_gpu.py", "data_parallel.py") else str
    _, trainer = apply("tensorboard", 2, *SMALL, script=script, edit=edit)
    trainer.train(2)
    events = EventAccumulator("runs").Reload()
    for name in ("loss/train", "loss/test", "accuracy"):
        assert [event.step for event in events.Scalars(name)] == [0, 1]
    (losses,) = [re.findall(r"Test loss: (\S+)", capsys.readouterr().out)]
    assert [f"{event.value:.4f}" for event in events.Scalars("loss/test")] == losses


def test_inference_and_export(apply, capsys):
    _, trainer = apply(None, 1, *SMALL)
    trainer.train(1)
    capsys.readouterr()
    classify, export = re.findall(r"```python (?:classify.py|export)\n(.*?)```", PAGE, re.S)
    names = {}
    exec(classify, names)
    text = capsys.readouterr().out
    model, images = names["model"], names["images"]
    assert text == f"{(model(images).argmax(1) == names['targets']).sum()} of 2000\n"
    for ours, theirs in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    exec(export, names)
    exported = torch.export.load("model.pt2").module()
    assert torch.allclose(exported(images[:7]), model(images[:7]), atol=1e-6)


def test_sharded_weights_are_those_of_one_process_and_are_resumed(tmp_path):
    """docs/your_loop.py is the program that fully_shard.py is made from."""
    program = (FOLDER / "fully_shard.py").read_text()
    loop = "range(first_epoch, 5)"
    assert program.count(loop) == 1
    (tmp_path / "half.py").write_text(program.replace(loop, "range(first_epoch, 2)"))
    text = train(tmp_path, tmp_path / "half.py", 2, dtype="float64")
    text += train(tmp_path, FOLDER / "fully_shard.py", 2, dtype="float64")
    ours = load(tmp_path / "snapshot.pt")["model"]
    (tmp_path / "snapshot.pt").unlink()
    assert text == train(tmp_path, ROOT / "docs" / "your_loop.py", 1, dtype="float64")
    theirs = load(tmp_path / "snapshot.pt")["model"]
    assert max((ours[name] - theirs[name]).abs().max() for name in theirs) < 1e-12


def test_a_stream_trains_on_each_sample_once(tmp_path):
    """As one process does that takes the batches of both ranks together."""
    words = command(f"torchrun --standalone --nproc_per_node=2 {FOLDER / 'stream.py'}")
    text = Job(words, tmp_path, {"LADDER_ATEXIT": "1"}).finish()
    assert len(re.findall("^Python ends: (?!.*gloo)", text, re.M)) == 3, text
    assert re.findall(r"epoch (\d): \d+ of (\d+)", text) == [(str(n), "1000") for n in range(5)]
    names = {}  # the program up to where it needs torchrun
    exec((FOLDER / "stream.py").read_text().partition("\nrank, world_size")[0], names)
    files = sorted((tmp_path / "stream").iterdir())
    streams = [names["Stream"](files, rank, 2) for rank in range(2)]
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for streams[0].epoch in range(5):
        streams[1].epoch = streams[0].epoch
        for batches in zip_longest(*(DataLoader(stream, batch_size=32) for stream in streams)):
            inputs, targets = zip(*filter(None, batches), strict=True)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.cat(inputs)), torch.cat(targets)).backward()
            optimizer.step()
    ours, theirs = load(tmp_path / "model.pt"), model.state_dict()
    assert max((ours[name] - theirs[name]).abs().max() for name in theirs) < 1e-4
    seen = []
    for worker in range(2):
        names["get_worker_info"] = lambda id=worker: SimpleNamespace(id=id, num_workers=2)
        seen += [inputs[0].item() for stream in streams for inputs, _ in stream]
    assert len(seen) == len(set(seen)) == 1_000
