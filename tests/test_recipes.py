"""docs/recipes.md: each change fits the script, and does what the page says of it."""

import functools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import ANY, Mock, call

import pytest
import torch
import torch.nn.functional as F
from helpers.files import difference, load, patched, same_bytes
from helpers.jobs import ROOT, command, epochs, every_script
from helpers.ranks import train
from PIL import Image
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader
from torchvision.models import ResNet18_Weights, resnet18

pytestmark = pytest.mark.numbers

PAGE = (ROOT / "docs" / "recipes.md").read_text()
FOLDER = ROOT / "docs" / "recipes"
FILES = {path.stem: path.read_text() for path in FOLDER.glob("*.diff")}
RECIPES = {**FILES, **dict(re.findall(r"```diff (\w+)\n(.*?)```", PAGE, re.S))}
SMALL = ("--model", "mlp", "--batch-size", 8, "--lr", 0.1)  # five steps an epoch


@pytest.fixture
def apply(make, monkeypatch, tmp_path):
    """apply(recipes or None, *arguments) -> as make(), of a script with these recipes."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def apply(names, *arguments, script="ddp_torchrun.py", edit=str):
        text = (ROOT / script).read_text()
        for name in (names or "").split():
            text = patched(text, edit(RECIPES[name]))
        (tmp_path / script).write_text(text)
        monkeypatch.setitem(sys.modules, script[:-3], ModuleType("forgotten after the test"))
        del sys.modules[script[:-3]]
        return make(script, *arguments)

    return apply


def test_every_recipe_is_applied_by_a_test():
    code = "".join(path.read_text() for path in Path(__file__).parent.glob("test_recipes*.py"))
    names = RECIPES.keys() - {"padded"}  # which test_your_loop.py applies
    assert [name for name in names if not re.search(rf'"(\w+ )?{name}"', code)] == []
    assert [path.name for path in FOLDER.glob("*.py") if f'"{path.name}"' not in code] == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_applied_by_git(tmp_path, name):
    """It is stricter than `patch`, because it takes no context that has changed."""
    file = re.search(r"^\+\+\+ b/(.*)", FILES[name], re.M)[1]
    (tmp_path / "docs").mkdir()
    (tmp_path / file).write_text((ROOT / file).read_text())
    subprocess.run(["git", "apply", FOLDER / f"{name}.diff"], cwd=tmp_path, check=True)
    assert (tmp_path / file).read_text() == patched((ROOT / file).read_text(), FILES[name])


SMALL_PHOTOS = functools.partial(re.sub, "= 224", "= 32")


@pytest.fixture
def photos(tmp_path):
    for part, count in (("train", 8), ("val", 3)):
        for name in ("red", "lime", "blue"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                photo = Image.new("RGB", (30, 24), name)
                photo.paste("black", (0, 0, 15, 24))  # the left half
                photo.save(folder / f"{number}.png")
    return "--data-dir", "photos", "--batch-size", 8


def test_images_from_disk(apply, photos, capsys, tmp_path):
    """Normalised, in all of their colours, and for training also flipped and cropped."""
    _, trainer = apply("images", 1, *photos, edit=SMALL_PHOTOS)
    trainer.train(1)
    assert epochs(capsys.readouterr().out)[0]["total"] == 9
    assert load(tmp_path / "checkpoint.pt")["model"]["fc.weight"].shape == (3, 512)
    for channel, mean, std in ((0, 0.485, 0.229), (1, 0.456, 0.224), (2, 0.406, 0.225)):
        photos = [photo for photo, name in trainer.test_data.dataset if name == 2 - channel]
        assert [photo[channel, 16, 30].item() for photo in photos] == 3 * [
            pytest.approx((1 - mean) / std)
        ]
    crops = [trainer.train_data.dataset[0][0][2] for _ in range(20)]  # of a blue photo
    assert {crop.shape for crop in crops} == {(32, 32)}
    assert {(crop[16, 31] - crop[16, 0]).sign().item() for crop in crops} >= {-1, 1}
    assert len({crop.sum().item() for crop in crops}) > 10


def test_pretrained_weights(apply, photos, monkeypatch, tmp_path):
    weights, folder = resnet18().state_dict(), tmp_path / "weights" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(weights, folder / Path(ResNet18_Weights.DEFAULT.url).name)
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    _, trainer = apply("images pretrained", 1, *photos, edit=SMALL_PHOTOS)
    model = trainer.model.module
    assert torch.equal(model.layer4[1].conv2.weight, weights["layer4.1.conv2.weight"])
    assert model.fc.out_features == 3


def test_text_of_unequal_length(apply, monkeypatch, tmp_path):
    """One class has more of the letter a; padding changes no output, and is compiled once."""
    lines = [f"{n % 2}\t{'ab'[n % 2] * (3 + n % 7)}{'c' * (n % 5)}\n" for n in range(40)]
    (tmp_path / "train.txt").write_text("".join(lines))
    (tmp_path / "val.txt").write_text("".join(lines[:9]))
    graphs = CompileCounter()
    compiled = functools.partialmethod(nn.Module.compile, backend=graphs)
    monkeypatch.setattr(nn.Module, "compile", compiled)
    module, trainer = apply("text", 3, "--data-dir", ".", "--batch-size", 8, "--lr", 1, "--compile")
    trainer.train(3)
    old = torch.__version__.startswith("2.11.")  # compiles no nn.Sequential (pytorch#150915)
    assert graphs.frame_count == (0 if old else 2)  # training and evaluation
    assert trainer._evaluate()[1] == 9
    texts, _ = module.pad(trainer.test_data.dataset)
    assert (texts == 0).any()
    model = trainer.model.module
    each = [model(text[None]) for text, _ in trainer.test_data.dataset]
    assert torch.allclose(model(texts), torch.cat(each), atol=1e-6)


def test_warm_up_and_cosine_are_resumed_and_at_another_rate(apply, monkeypatch, tmp_path):
    _, trainer = apply("schedule", 3, *SMALL, "--snapshot-path", "whole.pt")
    rates, (group,) = [], trainer.optimizer.param_groups
    trainer.optimizer.register_step_pre_hook(lambda *_: rates.append(group["lr"]))
    trainer.train(3)
    assert rates[:6] == sorted(rates[:6]) and rates[0] < 0.002 and rates[5] == pytest.approx(0.1)
    assert rates[5:] == sorted(rates[5:], reverse=True) and len(rates) == 15
    _, trainer = apply("schedule", 3, *SMALL, "--save-steps", 1)
    trainer.optimizer.register_step_pre_hook(Mock(side_effect=[None, KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(3)
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


def test_the_best_snapshot_is_kept(apply, tmp_path):
    for total, answers, best in ((2, [3, 7], 2), (4, [5, 6], 2), (5, [8], 5)):
        _, trainer = apply("best", total, *SMALL, "--resume")
        scores = [torch.tensor([0.0, right]) for right in answers]
        trainer._evaluate = iter(scores).__next__
        trainer.train(total)
        assert load(tmp_path / "checkpoint.pt.best")["epoch"] == best
        assert load(tmp_path / "checkpoint.pt")["epoch"] == total


def test_early_stopping_counts_on_in_a_resumed_run(apply, tmp_path):
    """A NaN is no improvement, and no lowest loss either; what has stopped stays stopped."""
    losses = torch.tensor([3, 2, 2.5, 2, 1, 1, torch.nan, 4])  # the last three are no better
    starts = ((9, 0, "--snapshot-path", "whole.pt"), (7, 0), (9, 7, "--resume"), (9, 8, "--resume"))
    for total, first, *options in starts:
        _, trainer = apply("early", total, 9, *SMALL, *options)
        values = [torch.stack([10 * loss, torch.tensor(5)]) for loss in losses[first:]]
        trainer._evaluate = iter(values).__next__
        trainer.train(total)
    whole, resumed = load(tmp_path / "whole.pt"), load(tmp_path / "checkpoint.pt")
    assert whole["epoch"] == resumed["epoch"] == 8 and same_bytes(resumed, whole)
    assert whole["early"] == resumed["early"] == (10.0, 3)


def test_early_stopping_of_two_ranks(apply, fashion, tmp_path):
    """Without any learning the loss stays as it is."""
    apply("best early", 1, *SMALL)  # the page says that both go together
    options = (9, 9, *fashion(16, 8), "--lr", 0, "--timeout", 30)
    text = train(tmp_path, tmp_path / "ddp_torchrun.py", 2, *options)
    assert len(epochs(text)) == 4 and "Total time: " in text
    assert load(tmp_path / "checkpoint.pt")["epoch"] == 4


@pytest.mark.slow("a real torchrun")
@pytest.mark.parametrize(("whom", "status"), [("torchrun", 1), ("rank 1", 0)])
def test_a_stop_that_saves_at_once(apply, fashion, start, tmp_path, whom, status):
    """After ten steps or more. The loader's workers ignore the signal, as the page says."""
    (ignore,) = re.findall(r"`(signal\.signal.*?)`", PAGE)
    apply("stop", 1)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    loader = tmp_path / "common" / "loader.py"
    lines = f"@@\n def _end_with_the_rank(worker_id: int) -> None:\n+    {ignore}\n"
    lines += "@@\n import os\n+import signal\n"
    loader.write_text(patched(loader.read_text(), lines))
    options = (1, *fashion(800, 10), "--batch-size", 8, "--log-interval", 1)
    train(tmp_path, "ddp_torchrun.py", 2, *options, "--snapshot-path", "whole.pt")
    path = tmp_path / "ddp_torchrun.py"
    launch = f"torchrun --standalone --nproc_per_node=2 {path}"
    workers = ("--num-workers", 1) if whom == "torchrun" else ()
    job = start(launch, *options, *workers, LADDER_SLOW="0:0.1")
    job.wait_for(r"Epoch 0 \| Step 12 ")
    os.kill(job.process.pid if whom == "torchrun" else job.workers()[1], signal.SIGTERM)
    text = job.finish(status)
    assert text.count("Epoch 0 | Stopped, saved at checkpoint.pt\n") == 1
    assert 'ddp_torchrun.py", line' not in text, text  # torchrun shows a traceback of its own
    whole, stopped = load(tmp_path / "whole.pt"), load(tmp_path / "checkpoint.pt")
    assert stopped["samples_seen"] in (320, 480, 640) and not same_bytes(stopped, whole)
    train(tmp_path, path, 2, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), whole)


def test_each_sample_tests_one_fold_and_folds_are_resumed(apply, capsys, tmp_path):
    tested = []
    for fold in range(5):
        _, trainer = apply("folds", 1, *SMALL, "--fold", fold)
        parts = [data.dataset.indices for data in (trainer.test_data, trainer.train_data)]
        assert sorted(parts[0] + parts[1]) == list(range(40))
        tested += parts[0]
    assert sorted(tested) == list(range(40))
    for total, *options in ((2, "--snapshot-path", "whole.pt"), (1,), (2, "--resume")):
        apply("folds", total, *SMALL, "--fold", 3, *options)[1].train(total)
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    with pytest.raises(SystemExit, match="was made with --fold 3, not 2"):
        apply("folds", 2, *SMALL, "--fold", 2, "--resume")
    epoch, *_ = epochs(capsys.readouterr().out)
    assert epoch["total"] == 8


def test_a_new_head_on_old_weights(apply, tmp_path):
    apply(None, 1)[1].train(1)
    (tmp_path / "checkpoint.pt").rename(tmp_path / "old.pt")
    old = load(tmp_path / "old.pt")["model"]
    for total, *options in ((2, "--snapshot-path", "whole.pt"), (1,), (2, "--resume")):
        _, trainer = apply("head", total, *options)
        now = trainer.model.module.state_dict()
        new = [name for name in old if not torch.equal(old[name], now[name])]
        assert new == (list(old) if "--resume" in options else list(old)[-2:])
        trainer.train(total)
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


def test_channels_last_and_tf32(apply, capfd, tmp_path):
    """The layout goes from the weights to what the layers hand on."""
    apply(None, 2, "--snapshot-path", "plain.pt")[1].train(2)
    try:
        for total, *options in ((2, "--snapshot-path", "whole.pt"), (1,), (2, "--resume")):
            _, trainer = apply("fast", total, *options)
            layouts = set()
            for layer in trainer.model.module.features:
                layer.register_forward_hook(
                    lambda _, inputs, output, layouts=layouts: layouts.add(
                        output.is_contiguous(memory_format=torch.channels_last)
                    )
                )
            trainer.train(total)
            assert layouts == {True} and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    whole = load(tmp_path / "whole.pt")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), whole)
    assert difference(load(tmp_path / "plain.pt"), whole) < 1e-4
    assert "strides" not in capfd.readouterr().err  # DDP warns where gradients do not fit its view


def test_a_profile_of_each_rank(apply, fashion, tmp_path):
    """It changes no weights, in a resumed run either."""
    edit = functools.partial(re.sub, "step == 10", "step == 3")
    for name, total, *options in ((None, 2, "--snapshot-path", "whole.pt"), ("profile", 1)):
        apply(name, total, *SMALL, *options, script="ddp_spawn.py", edit=edit)[1].train(total)
    apply("profile", 2, *SMALL, "--resume", script="ddp_spawn.py", edit=edit)[1].train(2)
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    (tmp_path / "trace0.json").unlink()
    train(tmp_path, tmp_path / "ddp_spawn.py", 2, 1, *fashion(80, 8), "--batch-size", 8)
    for rank in range(2):
        events = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {"gloo:all_reduce", "Optimizer.step#SGD.step"} <= names, names


def test_a_metric_of_all_predictions(apply, fashion, tmp_path):
    """Ranks with 5 and 4 of them find what one process finds."""
    module, _ = apply("gather", 1, *SMALL)
    predicted, targets = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])
    assert module.macro_f1(predicted, targets) == pytest.approx((2 / 3 + 4 / 5) / 2)
    found = []
    for processes in (1, 2):
        options = (1, *fashion(80, 9), "--batch-size", 8 // processes)
        text = train(tmp_path, tmp_path / "ddp_torchrun.py", processes, *options, dtype="float64")
        found += re.findall(r"^F1: (.*)$", text, re.M)
    assert len(found) == 2 and found[0] == found[1] != "0.0000"


@pytest.mark.slow("a real torchrun")
def test_a_debugger_in_one_rank(apply, tmp_path):
    apply("breakpoint", 1, *SMALL)
    launch = f"torchrun --standalone --nproc_per_node=2 {tmp_path}/ddp_torchrun.py"
    words = command(launch, 1, "--model", "mlp")
    typed = "up\np number * 1111\nc\n"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, input=typed, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "(Pdb) 3333\n" in done.stdout and "Total time: " in done.stdout, done.stdout


@pytest.mark.parametrize("names", ["clip", "fp16 clip"])
def test_clipping(apply, names):
    """With fp16, after the line that the page names for it."""
    (unscale,) = re.findall(r"`(self\.scaler\.unscale_.*)`", PAGE)
    lines = f"+            {unscale}\n" if "fp16" in names else ""
    edit = functools.partial(re.sub, r"(?=\+            nn\.utils)", lines)
    options = (*SMALL, "--momentum", 0, *["--amp"] * ("fp16" in names))
    _, trainer = apply(names, 1, *options, edit=edit)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    start = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    trainer._run_batch(3 * torch.randn(8, 1, 28, 28), torch.zeros(8).long(), 1.0, True)
    moved = nn.utils.parameters_to_vector(trainer.model.parameters()).detach() - start
    assert moved.norm() == pytest.approx(0.1, rel=1e-2)  # the rate times max_norm


def test_fp16_and_its_scale_are_resumed(apply, capsys, tmp_path):
    """The scale is doubled after two good steps, and halved by a step whose gradients overflow."""
    edit = functools.partial(re.sub, "device.type, enabled", "device.type, 64, 2, 0.5, 2, enabled")
    for total, *options in ((3, "--snapshot-path", "whole.pt"), (1,), (3, "--resume")):
        _, trainer = apply("fp16", total, *SMALL, "--amp", *options, edit=edit)
        trainer.train(total)
    whole, resumed = load(tmp_path / "whole.pt"), load(tmp_path / "checkpoint.pt")
    assert same_bytes(resumed, whole) and resumed["scaler"] == whole["scaler"]
    scale = trainer.scaler.get_scale()
    assert scale == 64 * 2**7  # 15 good steps
    trainer._run_batch(torch.full((8, 1, 28, 28), 1e6), torch.zeros(8).long(), 1.0, True)
    assert trainer.scaler.get_scale() == scale / 2
    assert same_bytes({**whole, "model": trainer.model.module.state_dict()}, whole)
    apply(None, 3, *SMALL, "--snapshot-path", "plain.pt")[1].train(3)
    losses = [epoch["train_loss"] for epoch in epochs(capsys.readouterr().out)]
    # Processors round fp16 differently, so a loss may be off by 3% after three epochs. If the scale
    # were not undone, the rate would be 64 times as high.
    assert losses[:3] == losses[3:6] == pytest.approx(losses[6:], rel=0.2)
    assert apply("fp16", 3, *SMALL, "--amp", "--snapshot-path", "plain.pt", "--resume")


def test_both_optimizers_are_resumed(apply, tmp_path):
    """Of the smaller model, because Muon's bfloat16 is slow on some processors."""
    options = ("--batch-size", 8, "--lr", 0.1)
    apply("optimizers", 2, *options, "--snapshot-path", "whole.pt")[1].train(2)
    _, trainer = apply("optimizers", 1, *options)
    start = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train(1)
    assert not any(map(torch.equal, start, trainer.model.parameters()))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    apply("optimizers", 2, *options, "--resume")[1].train(2)
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


def test_checkpointing_computes_twice_what_it_does_not_keep(apply, tmp_path):
    """With dropout: the second pass draws the same units."""
    passes = []
    for name in (None, "checkpointing"):
        _, trainer = apply(name, 1, "--batch-size", 8, "--snapshot-path", f"{name}.pt")
        convolution = trainer.model.module.features[0]
        convolution.register_forward_hook(lambda *_, name=name: passes.append(name))
        trainer._run_epoch(0)
        trainer._save_snapshot()
    assert passes == 5 * [None] + 10 * ["checkpointing"]
    assert same_bytes(load(tmp_path / "checkpointing.pt"), load(tmp_path / "None.pt"))


def test_gradients_in_bf16(apply):
    found = []
    for name in (None, "bf16"):
        trainer = apply(name, 1, *SMALL)[1]
        last = list(trainer.model.parameters())[-1]
        trainer.optimizer.register_step_pre_hook(lambda *_, last=last: found.append(last.grad))
        trainer._run_batch(trainer.test_data.dataset.images.float(), torch.arange(10), 1.0, True)
    plain, rounded = found
    assert torch.equal(rounded, plain.bfloat16().float()) and not torch.equal(rounded, plain)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_has_a_tracker(apply, monkeypatch, rank):
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    _, trainer = apply("tracker", 2, *SMALL)
    trainer.rank = rank
    trainer.train(2)
    run, numbers = call.init(), dict.fromkeys(("loss/train", "loss/test", "accuracy"), ANY)
    begin = call.init(project="digits", config=vars(trainer.args))
    logged = [run.log(numbers, step=epoch) for epoch in (0, 1)]
    assert wandb.mock_calls == ([] if rank else [begin, *logged, run.finish()])


@every_script
def test_tensorboard_shows_each_epoch_once(apply, capsys, monkeypatch, script):
    """Also one that was trained after the snapshot, and is trained again; from rank 0 alone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # File names end with the writer's number in this process, and 10 would be read before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", Mock(**{"get.side_effect": range(9)}))
    snapshot = Path("checkpoint.pt")
    apply("tensorboard", 1, *SMALL, script=script)[1].train(1)
    first = snapshot.read_bytes()
    for total in (2, 3):
        snapshot.write_bytes(first)
        apply("tensorboard", total, *SMALL, "--resume", script=script)[1].train(total)
    events = EventAccumulator("runs").Reload()
    for name in ("loss/train", "loss/test", "accuracy"):
        assert [event.step for event in events.Scalars(name)] == [0, 1, 2]
    printed = {epoch["epoch"]: epoch["test_loss"] for epoch in epochs(capsys.readouterr().out)}
    shown = {event.step: round(event.value, 4) for event in events.Scalars("loss/test")}
    assert shown == pytest.approx(printed)
    _, trainer = apply("tensorboard", 1, *SMALL, script=script)
    if hasattr(trainer, "rank"):
        files, trainer.rank = list(Path("runs").iterdir()), 1
        trainer.train(1)
        assert list(Path("runs").iterdir()) == files


def test_inference(apply, capsys):
    _, trainer = apply(None, 1, *SMALL)
    trainer.train(1)
    (classify,) = re.findall(r"```python classify.py\n(.*?)```", PAGE, re.S)
    names = {}
    exec(classify, names)
    text = capsys.readouterr().out
    model, (images, targets) = names["model"], names["test_set"].__getitems__(range(2000))
    assert text.endswith(f"\n{(model(images).argmax(1) == targets).sum()} of 2000\n")
    assert all(map(torch.equal, model.parameters(), trainer.model.parameters()))


def test_a_stream_trains_on_each_sample_once(run, tmp_path):
    """As one process does that takes the batches of both ranks together."""
    program = FOLDER / "stream.py"
    text = run(f"torchrun --standalone --nproc_per_node=2 {program}", LADDER_ATEXIT=1)
    assert len(re.findall("^Python ends: (?!.*gloo)", text, re.M)) == 3, text
    assert re.findall(r"epoch (\d): \d+ of (\d+)", text) == [(str(n), "1000") for n in range(5)]
    names = {}  # the program up to where it needs torchrun
    exec(program.read_text().partition("\ndef main()")[0], names)
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
    torch.testing.assert_close(load(tmp_path / "model.pt"), model.state_dict(), rtol=0, atol=1e-4)
    seen = []
    for worker in range(2):
        names["get_worker_info"] = lambda id=worker: SimpleNamespace(id=id, num_workers=2)
        seen += [inputs[0].item() for stream in streams for inputs, _ in stream]
    assert len(seen) == len(set(seen)) == 1_000
