"""docs/recipes.md: each change fits its program, and does what the page says of it."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.files import difference, load, patched, same_bytes
from helpers.jobs import ROOT, command, epochs
from helpers.ranks import train
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import ResNet18_Weights, resnet18

from common.data import make_digits
from common.model import build_model

SCRIPT, LOOP = "ddp_torchrun.py", "docs/your_loop.py"
PAGE = (ROOT / "docs" / "recipes.md").read_text()
FILES = {path.stem: path.read_text() for path in ROOT.glob("recipes/*.diff")}
RECIPES = {**FILES, **dict(re.findall(r"```diff (\w+)\n(.*?)```", PAGE, re.S))}
SMALL = ("--model", "mlp", "--batch-size", 8, "--lr", 0.1)  # do() then takes five steps an epoch
KEEP = """@@ the snapshot of the first epoch stays under another name
     os.replace(f"{args.snapshot_path}.tmp", args.snapshot_path)  # all or nothing, if it is killed
+    if epochs == 1:
+        os.link(args.snapshot_path, "middle.pt")
"""


def own(code: str) -> str:
    """A hunk with data or a model of a test's own, after the imports that it takes the place of."""
    return "@@\n" + textwrap.indent(code, "+", lambda line: True) + " def ddp_setup(args):\n"


def digits(count: int) -> str:
    return own(f"""from common.data import make_digits
load_dataset = lambda *_: (make_digits({count}, 0), make_digits(10, 1))
""")


DIGITS = digits(80)
NORM = own("""from torch import nn
build_model = lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10))
""")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """recipe(names, *hunks, script, edit) -> the path of a script with these recipes and hunks.

    `edit` changes the recipes' text first. do() then runs this script.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def recipe(names: str, *hunks: str, script: str = SCRIPT, edit=str) -> Path:
        text = (ROOT / script).read_text()
        for diff in (*(edit(RECIPES[name]) for name in names.split()), *hunks):
            text = patched(text, diff)
        path = tmp_path / f"script{len([*tmp_path.glob('script*')])}" / Path(script).name
        path.parent.mkdir()
        path.write_text(text)
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setitem(sys.modules, path.stem, ModuleType("forgotten after the test"))
        del sys.modules[path.stem]
        return path

    return recipe


@pytest.fixture
def resumed(recipe, tmp_path):
    """resumed(names, *hunks) -> the last snapshot of a resumed run, and the output of a whole one.

    The whole one has two ranks. The other one goes on after the first of its two epochs, by default
    with one process, which takes the batches of both. Both end with the same snapshot.
    """

    def resumed(
        names: str,
        *hunks: str,
        edit=str,
        arguments: tuple = ("--model", "mlp", "--lr", 0.1),
        processes: int = 1,
        tolerance: float = 1e-12,
        dtype: str = "float64",
    ) -> tuple:
        path = recipe(names, *hunks, KEEP, edit=edit)
        options = (2, 1, *arguments, "--batch-size")
        text = train(tmp_path, path, 2, *options, 8, dtype=dtype)
        more = (16 // processes, "--resume", "--snapshot-path", "middle.pt")
        train(tmp_path, path, processes, *options, *more, dtype=dtype)
        whole, last = (load(tmp_path / f"{name}.pt") for name in ("checkpoint", "middle"))
        assert whole["epoch"] == 2
        torch.testing.assert_close(last, whole, rtol=0, atol=tolerance if processes == 1 else 0)
        return last, text

    return resumed


def test_every_recipe_is_applied_by_a_test():
    code = "".join(path.read_text() for path in Path(__file__).parent.glob("test_recipes*.py"))
    assert [name for name in RECIPES if not re.search(rf'"(\w+ )*{name}( \w+)*"', code)] == []
    assert [path.name for path in ROOT.glob("recipes/*.diff") if f"/{path.name})" not in PAGE] == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_applied_by_git(tmp_path, name):
    """It is stricter than `patch`, because it takes no context that has changed."""
    shutil.copy(ROOT / SCRIPT, tmp_path)
    subprocess.run(["git", "apply", ROOT / "recipes" / f"{name}.diff"], cwd=tmp_path, check=True)
    assert (tmp_path / SCRIPT).read_text() == patched((ROOT / SCRIPT).read_text(), FILES[name])


# --- data ---------------------------------------------------------------------------------------


def test_images_from_disk_and_pretrained_weights(recipe, do, tmp_path):
    """For training also flipped and cropped."""
    for part, count in (("train", 8), ("val", 3)):
        for name in ("red", "lime", "blue"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                photo = Image.new("RGB", (30, 24), name)
                photo.paste("black", (0, 0, 15, 24))  # the left half
                photo.save(folder / f"{number}.png")
    weights, folder = resnet18().state_dict(), tmp_path / "weights" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(weights, folder / Path(ResNet18_Weights.DEFAULT.url).name)
    smaller = partial(re.sub, "side=224", "side=32")
    path = recipe("images pretrained", edit=smaller)
    assert epochs(train(tmp_path, path, 2, 1, "--batch-size", 4, "--lr", 0))[0]["total"] == 9
    model = load(tmp_path / "checkpoint.pt")["model"]
    assert torch.equal(model["layer4.1.conv2.weight"], weights["layer4.1.conv2.weight"])
    assert model["fc.weight"].shape == (3, 512)
    sets = do.module(SCRIPT).load_photos(tmp_path / "photos")
    for photos, random in zip(sets, (True, False), strict=True):
        seen = {photos[0][0].sum().item() for _ in range(20)}
        assert photos[0][0].shape == (3, 32, 32) and (len(seen) > 1) == random


def test_mixup_of_training_samples_alone(recipe, do, monkeypatch):
    recipe("mixup")
    seen, loss = [], F.cross_entropy
    see = lambda outputs, targets: seen.append(targets) or loss(outputs, targets)  # noqa: E731
    monkeypatch.setattr(F, "cross_entropy", see)
    do(SCRIPT, 1, *SMALL)
    mixed = torch.cat(seen[:5])
    assert mixed.shape == (40, 10) and torch.allclose(mixed.sum(dim=1), torch.ones(40))
    assert 0.5 < mixed.max(dim=1)[0].mean() < 0.99
    assert torch.equal(torch.cat(seen[5:]), make_digits(10, 1).targets)


TEXTS = own("""# of unequal lengths, with more of one letter in each class
texts = [(n % 2, (n % 2 + 97) * torch.ones(3 + n * n % 37).long()) for n in range(80)]
texts = [(torch.cat([text, torch.tensor([99])]), name) for name, text in texts]
load_dataset = lambda *_: (texts, texts[:9])
build_model = lambda *_: torch.nn.Sequential(
    torch.nn.EmbeddingBag(256, 64, mode="mean", padding_idx=0), torch.nn.Linear(64, 2))
""")


def test_text_of_unequal_length(resumed):
    assert epochs(resumed("text", TEXTS, arguments=("--lr", 1))[1])[-1]["correct"] == 9


DICTS = own("""# pairs of digits, and a model that compares them
def pairs(count, seed):
    images = make_digits(count, seed)
    both = [(images[index], images[index // 7]) for index in range(count)]
    return [{"left": x, "right": y, "labels": int(m == n)} for (x, m), (y, n) in both]
load_dataset = lambda *_: (pairs(80, 0), pairs(10, 1))
class Siamese(torch.nn.Linear):
    def forward(self, left, right):
        return argparse.Namespace(logits=super().forward((left - 2 * right).flatten(1)))
build_model = lambda *_: Siamese(784, 2)
""")
TOKENS = own("""# texts of 2 to 9 tokens, of which each can be told from the last
def texts(count):
    ids = [(torch.arange(9) * 3 + n) % 20 for n in range(count)]
    kept = [torch.arange(9) < 2 + n % 8 for n in range(count)]
    labels = map(torch.where, kept, ids, [torch.tensor(-100)] * count)
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)]
load_dataset = lambda *_: (texts(80), texts(80))
class Causal(torch.nn.Sequential):
    def forward(self, input_ids):
        return argparse.Namespace(logits=super().forward(input_ids))
build_model = lambda *_: Causal(torch.nn.Embedding(20, 32), torch.nn.Linear(32, 20))
""")


def test_batches_that_are_dicts(resumed):
    resumed("dicts", DIGITS, DICTS)


def test_a_causal_language_model_is_that_of_one_process(resumed):
    """Each rank has other numbers of tokens. A model that copied its input would know none."""
    first, last = epochs(resumed("causal", TOKENS, arguments=("--lr", 0.3))[1])
    assert last["val_loss"] < first["val_loss"] and 50 < last["accuracy"] <= 100


def test_rare_classes_are_drawn_as_often_as_others(resumed, do):
    resumed("rare", DIGITS)
    data = make_digits(1001, 0)
    data.targets = (data.targets == 0).long()  # 101 of 1,001
    samplers = [do.module(SCRIPT).Balanced(data, 2, rank, seed=7) for rank in range(2)]
    first, second = map(list, samplers)
    assert len(first) == len(second) == 501 and first != second
    assert 450 < data.targets[first + second].sum() < 550
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != first


def test_whole_batches(resumed):
    """Of 90 samples, 80 are trained on in five steps."""
    assert "Epoch 1 | Batchsize: 8 | Steps: 5\n" in resumed("whole", digits(90))[1]


def test_a_stream_trains_on_each_sample_once(tmp_path):
    """As one process does that takes the batches of both ranks together."""
    program = ROOT / "recipes" / "stream.py"
    text = train(tmp_path, program, 2)
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


# --- models, losses and metrics -----------------------------------------------------------------


def test_gpt_is_that_of_one_process_and_learns_to_continue_a_text(resumed, recipe, do, tmp_path):
    """Rounding errors grow in AdamW, which divides by the root of small squares."""
    text = "How much wood would a woodchuck chuck? " * 88  # of 64 bytes 48 blocks to learn, and 5
    (tmp_path / "input.txt").write_text(text)
    tiny = partial(re.sub, "width=128, heads=4, layers=4", "width=16, heads=2, layers=2")
    given = ("--data-dir", ".", "--lr", 0.01)
    printed = resumed("gpt", edit=tiny, arguments=given, tolerance=1e-10)[1]
    assert re.search("samples/s\n\n[\\S\\s]{150}", printed)  # bytes of all kinds
    options = (30, 30, *given, "--batch-size", 4, "--snapshot-path", "learned.pt")
    last = epochs(train(tmp_path, recipe("gpt", edit=tiny), 2, *options))[-1]
    assert last["val_loss"] < 0.5 and 80 < last["accuracy"] <= 100
    model = do.module(SCRIPT).GPT(64, 16, 2, 2).eval()
    model.load_state_dict(load(tmp_path / "learned.pt")["model"])
    written = model.generate("How much wood", 200)
    pairs = [one + other in text for one, other in pairwise(written)]
    assert written.startswith("How much wood") and sum(pairs) > 0.9 * len(pairs) > 150
    block = torch.tensor([list(text[:64].encode())])
    changed = block.clone()
    changed[0, 40] += 1
    with torch.no_grad():  # it does not look ahead
        equal = torch.isclose(model(block), model(changed), atol=1e-5).all(dim=1)[0]
    assert equal.tolist() == 40 * [True] + 24 * [False]


def test_both_models_of_a_gan_are_those_of_one_process_and_are_resumed(resumed):
    edit = partial(re.sub, r"torch.randn\(len\(real\), 64, .*?\)", "real.flatten(1)[:, :64]")
    snapshot, printed = resumed("gan", DIGITS, edit=edit, arguments=("--lr", 0.001), tolerance=1e-9)
    assert len(snapshot["optimizer"]["state"]) == 4 + 6
    found = re.findall(r"ritic loss: (\S+) \| .enerator loss: (\S+)", printed)
    assert len(found) == 4 and all(0.01 < float(loss) < 5 for pair in found for loss in pair)


def test_contrastive_loss_is_that_of_one_large_batch(resumed):
    # Without random numbers, of which each rank draws its own, but with two views that differ.
    edit = partial(re.sub, r"views \+ .*views\)", "torch.cat([inputs, inputs.flip(3)])")
    first, last = re.findall(r"\| Train loss: (\S+)", resumed("contrastive", DIGITS, edit=edit)[1])
    assert 0 < float(last) < float(first)


MASKS = own("""# masks of digits, with a frame of another height in each that does not count
def masks(count, seed):
    samples = []
    images = make_digits(count, seed)
    for index in range(count):
        image, digit = images[index]
        mask = torch.where(image[0] > 0, digit % 9 + 1, 0)
        mask[: index % 9] = -100
        samples.append((image, mask))
    return samples
load_dataset = lambda *_: (masks(80, 0), masks(10, 1))
build_model = lambda *_: torch.nn.Conv2d(1, 10, 3, padding=1)
""")


def test_ignored_targets_and_metrics_of_a_confusion_matrix(resumed, do):
    """What is printed is what one process finds by hand."""
    snapshot, text = resumed("padded confusion", DIGITS, MASKS, arguments=("--lr", 0.1))
    model = nn.Conv2d(1, 10, 3, padding=1).double()
    model.load_state_dict(snapshot["model"])
    images, masks = zip(*do.module(SCRIPT).masks(10, 1), strict=True)
    scores, right = model(torch.stack(images).double()), torch.stack(masks)
    last, loss = epochs(text)[-1], F.cross_entropy(scores, right).item()
    guessed, right = scores.argmax(dim=1)[right != -100], right[right != -100]
    assert last["val_loss"] == pytest.approx(loss, abs=1e-4)
    assert last["correct"] == (guessed == right).sum() and last["total"] == len(right)
    scores = []
    for name in {*guessed.tolist(), *right.tolist()}:
        both = ((guessed == name) & (right == name)).sum().item()
        all_of_it = ((guessed == name).sum() + (right == name).sum()).item()
        scores.append((both / (all_of_it - both), 2 * both / all_of_it))
    expected = [sum(each) / len(scores) for each in zip(*scores, strict=True)]
    found = re.findall(r"Mean IoU: (\S+) \| F1: (\S+)", text)[-1]
    assert [*map(float, found)] == pytest.approx(expected, abs=1e-4)


LEARNED = own("""class YourLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(()))
    def forward(self, outputs, targets):
        return F.cross_entropy(outputs / self.temperature, targets)
""")


def test_a_loss_with_weights_is_that_of_one_process(resumed):
    """And rank 1 has what is in rank 0's snapshot."""
    see = '@@\n+    print("T", model.criterion.temperature.item())\n     return sums\n'
    snapshot, text = resumed("criterion", DIGITS, LEARNED, see)
    learned = snapshot["model"]["criterion.temperature"].item()
    _, first, _, second = map(float, re.findall(r"T (\S+)", text))  # after each epoch
    assert first == second == pytest.approx(learned, abs=1e-12) and learned != 1


def test_the_average_is_evaluated_and_resumed(resumed):
    edit = partial(re.sub, r"0\.999", "0.9")
    snapshot, printed = resumed("ema", DIGITS, NORM, edit=edit, processes=2)
    assert snapshot["ema"]["n_averaged"] == 10  # steps
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10))
    average = torch.optim.swa_utils.AveragedModel(model).double()
    average.load_state_dict(snapshot["ema"])
    inputs, targets = make_digits(10, 1).__getitems__(range(10))[0]
    loss = F.cross_entropy(average.eval()(inputs.double()), targets).item()
    assert epochs(printed)[-1]["val_loss"] == pytest.approx(loss, abs=1e-4)
    assert not torch.allclose(snapshot["ema"]["module.1.weight"], snapshot["model"]["1.weight"])


def test_predictions_come_once_and_in_order(resumed, recipe, tmp_path):
    """Also from a snapshot of a finished run."""
    file, options = tmp_path / "predictions.csv", ("--model", "mlp", "--lr", 0.01)
    snapshot, _ = resumed("predictions", DIGITS, arguments=options)
    one = file.read_text()
    model = build_model("mlp", "digits").double()
    model.load_state_dict(snapshot["model"])
    found = model(make_digits(10, 1).__getitems__(range(10))[0][0].double()).argmax(dim=1).tolist()
    assert one == "".join(f"{n},{name}\n" for n, name in enumerate(found)) and len({*found}) > 2
    file.unlink()
    train(tmp_path, recipe("predictions", DIGITS), 3, 2, "--resume", *options, dtype="float64")
    assert file.read_text() == one


# --- optimizers and snapshots -------------------------------------------------------------------


@pytest.mark.parametrize("line", ("-", " "))
def test_a_scheduler_is_resumed(resumed, line):
    """Also where somebody has left the lines that set this run's --lr."""
    edit = partial(re.sub, r"^-(    for group in|        group.update)", rf"{line}\1", flags=re.M)
    snapshot, _ = resumed("schedule", DIGITS, edit=edit)
    assert snapshot["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0, abs=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
def test_two_optimizers_are_resumed(resumed):
    two = NORM.replace("10), nn.BatchNorm1d(10)", "8), nn.Linear(8, 10)")
    snapshot, _ = resumed("optimizers", DIGITS, two, processes=2)
    (state,) = snapshot["muon"]["state"].values()
    assert state["momentum_buffer"].shape == (8, 784)  # of the hidden layer
    assert len(snapshot["optimizer"]["state"]) == 3


@pytest.fixture
def scored(recipe, do, monkeypatch):
    """scored(names, losses, *arguments) -> what do() returns, with these losses per epoch."""

    def scored(names: str, losses: list, *arguments: object) -> SimpleNamespace:
        recipe(names)
        values = iter([torch.tensor([10.0 * loss, 5.0]) for loss in losses])
        monkeypatch.setattr(do.module(SCRIPT), "evaluate", lambda *_: next(values))
        return do(SCRIPT, *arguments, *SMALL)

    return scored


def test_the_best_snapshot_is_kept(scored):
    for total, losses, best in ((2, [3, 2], 2), (4, [2.5, math.nan], 2), (5, [1], 5)):
        scored("best", losses, total, "--resume")
        assert load(Path("checkpoint.pt.best"))["epoch"] == best
        assert load(Path("checkpoint.pt"))["epoch"] == total
    Path("checkpoint.pt").unlink()
    scored("best", [9], 1)
    assert same_bytes(load(Path("checkpoint.pt.best")), load(Path("checkpoint.pt")))  # this run's


def test_early_stopping_counts_on_in_a_resumed_run(scored):
    """A NaN is no improvement, and no lowest loss either; what has stopped stays stopped."""
    losses = [3, 2, 2.5, 2, 1, 1, math.nan, 4]  # the last three are no better
    scored("best early", losses, 9, 9, "--snapshot-path", "whole.pt")
    for total, first, passes in ((7, 0, 7), (9, 7, 1), (9, 8, 0)):
        assert len(scored("best early", losses[first:], total, 9, "--resume").passes) == passes
    whole, resumed = load(Path("whole.pt")), load(Path("checkpoint.pt"))
    assert whole["epoch"] == resumed["epoch"] == 8 and same_bytes(resumed, whole)


WORSE = """@@ the second epoch is worse than the first
         val_loss, correct = sums.tolist()
+        val_loss += 1000 * epoch
"""


def test_a_test_set_is_for_the_best_snapshot(recipe, tmp_path):
    path = recipe("best test", DIGITS, WORSE)
    text = train(tmp_path, path, 2, 2, *SMALL[:4], "--lr", 0.001, dtype="float64")
    best = load(tmp_path / "checkpoint.pt.best")
    model = build_model("mlp", "digits").double()
    model.load_state_dict(best["model"])
    inputs, targets = make_digits(10, 1).__getitems__(range(10))[0]
    outputs = model(inputs.double()).detach()
    found = F.cross_entropy(outputs, targets), (outputs.argmax(1) == targets).double().mean()
    assert "Test loss: {:.4f} | Accuracy: {:.2%}\n".format(*map(float, found)) in text
    assert best["epoch"] == 1 and text.count("Test loss") == 1
    assert "Steps: 5" in text and "/8 (" in text  # 72 to train, and 8 to validate


def test_deterministic_kernels_are_chosen_before_the_process_group(recipe, do, monkeypatch):
    recipe("deterministic")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            do(SCRIPT)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_inference(do, capsys):
    job = do(SCRIPT, 1, *SMALL)
    (classify,) = re.findall(r"```python classify.py\n(.*?)```", PAGE, re.S)
    names = {}
    exec(classify, names)
    model, (images, targets) = names["model"], names["samples"].__getitems__(range(2000))[0]
    right = (model(images).argmax(1) == targets).sum()
    assert capsys.readouterr().out == f"{right} of 2000\n"
    assert all(map(torch.equal, model.parameters(), job.model.parameters()))


# --- watching and speed -------------------------------------------------------------------------


def test_tensorboard_shows_each_epoch_once(recipe, do):
    """Also one that was trained after the snapshot, and is trained again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe("tracker")
    do(SCRIPT, 1, *SMALL)
    first = Path("checkpoint.pt").read_bytes()
    do(SCRIPT, 2, *SMALL, "--resume")
    Path("checkpoint.pt").write_bytes(first)
    text = do(SCRIPT, 3, *SMALL, "--resume").text
    events = EventAccumulator("runs").Reload()
    for name in ("loss/train", "loss/val", "accuracy"):
        assert [event.step for event in events.Scalars(name)] == [0, 1, 2]
    shown = events.Scalars("loss/val")[-1].value
    assert shown == pytest.approx(epochs(text)[-1]["val_loss"], abs=1e-4)


def test_rank_0_alone_has_a_tracker_and_each_rank_a_profile(recipe, tmp_path):
    """Of two steps; the next epoch has one of its own."""
    train(tmp_path, recipe("tracker profile", digits(200)), 2, 2, *SMALL)
    assert len([*(tmp_path / "runs").iterdir()]) == 1
    for rank in range(2):
        events = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events]
        assert names.count("Optimizer.step#SGD.step") == 2 and "gloo:all_reduce" in names, names


@pytest.mark.slow("a real torchrun")
def test_a_debugger_in_one_rank(recipe, tmp_path):
    path = recipe("breakpoint", DIGITS)
    words = command(f"torchrun --standalone --nproc_per_node=2 {path}", 1, *SMALL)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    typed = "up\np len(loader) * 1111\n" + "c\n" * 5
    done = subprocess.run(words, input=typed, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "(Pdb) 5555\n" in done.stdout and "Epoch 0 | Train loss" in done.stdout, done


def test_the_layout_of_channels_last_and_checkpointing_change_no_weights(recipe, do, monkeypatch):
    """Dropout draws the same units when it is computed again."""
    forward, found = nn.Conv2d.forward, []

    def look(layer: nn.Conv2d, inputs: torch.Tensor) -> torch.Tensor:
        output = forward(layer, inputs)
        found.append(output.is_contiguous(memory_format=torch.channels_last))
        return output

    monkeypatch.setattr(nn.Conv2d, "forward", look)
    for name, per_step, layout in (("", 2, False), ("checkpointing", 4, False), ("fast", 2, True)):
        recipe(name)
        job = do(SCRIPT, 1, "--batch-size", 8, "--snapshot-path", f"{name}.pt")
        assert found == [layout] * (5 * per_step + 2 * 2)
        found.clear()
    assert job.passes[0][2].defaults["fused"]
    assert same_bytes(load(Path("checkpointing.pt")), load(Path(".pt")))
    assert difference(load(Path("fast.pt")), load(Path(".pt"))) < 1e-4


def test_batchnorm_needs_no_broadcast_in_each_step(recipe, tmp_path):
    seen = '@@\n     model.train()\n+    print("in each step:", model.will_sync_module_buffers())\n'
    runs = []
    for name, answer in (("", "True"), ("fast", "False")):
        options = (2, *SMALL, "--snapshot-path", f"{name}.pt")
        text = train(tmp_path, recipe(name, DIGITS, NORM, seen), 2, *options, dtype="float64")
        assert re.findall(r"in each step: (\w+)", text) == [answer] * 4
        runs.append((load(tmp_path / f"{name}.pt")["model"], epochs(re.sub(r"\d+ sam", "0 sam", text))))
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)


def test_fp16_and_its_scale_are_resumed(resumed, recipe, tmp_path):
    """The scale is doubled after two good steps."""
    edit = partial(re.sub, r"GradScaler\(device.type", r"\g<0>, 64, 2, 0.5, 2")
    snapshot, text = resumed("fp16", DIGITS, edit=edit, processes=2, dtype="float32")
    assert snapshot["scaler"]["scale"] == 64 * 2**5  # 10 good steps
    plain = train(tmp_path, recipe("", DIGITS), 2, 2, *SMALL, "--snapshot-path", "plain.pt")
    assert not same_bytes(load(tmp_path / "plain.pt"), snapshot)
    # If the scale were not undone, the rate would be 64 times as high.
    last, expected = (epochs(run)[-1]["train_loss"] for run in (text, plain))
    assert last == pytest.approx(expected, rel=0.2)


# --- a loop of one's own ------------------------------------------------------------------------


SEEN = {  # what shows that a change is at work, and what it shows in the last three epochs
    "loop_bf16": (
        """@@ evaluation
                 correct += (model.module(inputs).argmax(dim=1) == targets).sum()
+                print("seen", model.module(inputs).dtype)
""",
        12 * ["torch.bfloat16"],
    ),
    "loop_accumulate": (
        """@@ how often gradients are sent, with 16 steps an epoch
 from torch import nn
+from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
@@
     model = DDP(model)  # needs no device_ids, because the loop moves the inputs itself
+    sent, send = [], default_hooks.allreduce_hook
+    model.register_comm_hook(None, lambda group, bucket: sent.append(1) or send(group, bucket))
@@
         model.eval()
+        print("seen", len(sent))
""",
        2 * ["16", "32", "48"],
    ),
    "loop_workers": (
        """@@
         dist.all_reduce(correct)
+        print("seen", len(torch.multiprocessing.active_children()))
""",
        6 * ["8"],
    ),
    "loop_schedule": (
        """@@
         dist.all_reduce(correct)
+        print("seen", round(optimizer.param_groups[0]["lr"], 4))
""",
        2 * ["0.0345", "0.0095", "0.0"],  # of the next epoch
    ),
    "loop_best": (
        """@@ the second epoch is the best one, and the sixth does not begin
         dist.all_reduce(correct)
+        correct.fill_((1, 3, 2, 3, 2, 2)[epoch])
+        print("seen", epoch)
""",
        2 * ["2", "3", "4"],
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_change_of_your_loop(recipe, tmp_path, name):
    """Two ranks, stopped after two epochs and resumed, end as one process that never stopped."""
    hunk, expected = SEEN[name]
    last = {"loop_best": 8}.get(name, 5)
    until = "@@\n-    for epoch in range(first_epoch, 5):\n+    for epoch in range(first_epoch, {}):\n"
    changed = partial(recipe, name, hunk, script=LOOP)
    dtype = "float32" if name == "loop_bf16" else "float64"
    train(tmp_path, changed(until.format(2)), 2, dtype=dtype)
    first = load(tmp_path / "snapshot.pt")
    text = train(tmp_path, changed(until.format(last)), 2, dtype=dtype)
    assert re.findall("seen (.*)", text) == expected
    alone = tmp_path / "alone"
    alone.mkdir()
    same = name not in ("loop_schedule", "loop_best")  # as the loop has without the change
    train(alone, LOOP if same else changed(until.format(last)), 1, dtype=dtype)
    found, wanted = (load(folder / "snapshot.pt") for folder in (tmp_path, alone))
    if name == "loop_bf16":
        assert 1e-5 < difference(found, wanted) < 0.05
        return
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    if name == "loop_best":
        best = load(tmp_path / "best.pt")
        assert all(map(torch.equal, best.values(), first["model"].values()))
