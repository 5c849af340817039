"""docs/recipes.md: each change fits the script, and does what the page says of it."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.files import difference, load, patched, same_bytes
from helpers.jobs import ROOT, command, epochs, every_script
from helpers.ranks import train
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import ResNet18_Weights, resnet18

from common.data import make_digits

SCRIPT = "ddp_torchrun.py"
PAGE = (ROOT / "docs" / "recipes.md").read_text()
FILES = {path.stem: path.read_text() for path in ROOT.glob("recipes/*.diff")}
RECIPES = {**FILES, **dict(re.findall(r"```diff (\w+)\n(.*?)```", PAGE, re.S))}
SMALL = ("--model", "mlp", "--batch-size", 8, "--lr", 0.1)  # do() then takes five steps an epoch
DIGITS = """@@ 80 digits in place of 12,000
 from common.seed import set_seed
+from common.data import make_digits
+
+load_dataset = lambda *_: (make_digits(80, 0), make_digits(10, 1))
"""
KEEP = """@@ the snapshot of mid-epoch stays under another name
             log(f"Epoch {epoch} | Step {step} | Saved at {args.snapshot_path}")
+            if dist.get_rank() == 0:
+                os.link(args.snapshot_path, "middle.pt")
"""


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
        path = tmp_path / f"script{len([*tmp_path.glob('script*')])}" / script
        path.parent.mkdir()
        path.write_text(text)
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setitem(sys.modules, path.stem, ModuleType("forgotten after the test"))
        del sys.modules[path.stem]
        return path

    return recipe


@pytest.fixture
def resumed(recipe, tmp_path):
    """resumed(names, *hunks) -> the last snapshot and the output of one process.

    It ends as two ranks do, which take its batch of 16 samples in four micro-batches, and as they
    do when they resume from a snapshot of epoch 1's first step. All in double precision.
    """

    def resumed(
        names: str,
        *hunks: str,
        edit=str,
        arguments: tuple = ("--model", "mlp", "--lr", 0.1),
        batch: tuple = (4, "--accumulate", 2),
        save_steps: int = 6,
        one_process: bool = True,
        tolerance: float = 1e-12,
    ) -> tuple:
        path = recipe(names, *hunks, KEEP, edit=edit)
        (tmp_path / "middle.pt").unlink(missing_ok=True)
        two = (2, 2, *arguments, "--batch-size", *batch, "--save-steps", save_steps)
        text = train(tmp_path, path, 2, *two, dtype="float64")
        whole, middle = load(tmp_path / "checkpoint.pt"), load(tmp_path / "middle.pt")
        assert middle["epoch"] == 1 and middle["samples_seen"] == 16
        two = (*two, "--resume", "--snapshot-path", "middle.pt")
        train(tmp_path, path, 2, *two, dtype="float64")
        runs = [whole, load(tmp_path / "middle.pt")]
        if one_process:
            one = (2, 2, *arguments, "--batch-size", 16, "--snapshot-path", "one.pt")
            text = train(tmp_path, path, 1, *one, dtype="float64")
            runs.append(load(tmp_path / "one.pt"))
        for snapshot in runs:
            del snapshot["args"]
            if "scheduler" in snapshot:  # the rest of it has words
                snapshot["scheduler"] = snapshot["scheduler"]["last_epoch"]
        for run in runs[1:]:
            torch.testing.assert_close(run, whole, rtol=0, atol=tolerance)
        return runs[-1], text

    return resumed


@pytest.fixture
def each_step(monkeypatch):
    """each_step(look) calls look(parameter group) before each step of SGD."""

    def each_step(look: Callable) -> None:
        step = torch.optim.SGD.step
        new = lambda own: look(own.param_groups[0]) or step(own)  # noqa: E731
        monkeypatch.setattr(torch.optim.SGD, "step", new)

    return each_step


def test_every_recipe_is_applied_by_a_test():
    code = "".join(path.read_text() for path in Path(__file__).parent.glob("test_recipes*.py"))
    assert [name for name in RECIPES if not re.search(rf'"(\w+ )*{name}( \w+)*"', code)] == []
    assert [path.name for path in ROOT.glob("recipes/*.py") if f'"{path.name}"' not in code] == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_applied_by_git(tmp_path, name):
    """It is stricter than `patch`, because it takes no context that has changed."""
    shutil.copy(ROOT / SCRIPT, tmp_path)
    subprocess.run(["git", "apply", ROOT / "recipes" / f"{name}.diff"], cwd=tmp_path, check=True)
    assert (tmp_path / SCRIPT).read_text() == patched((ROOT / SCRIPT).read_text(), FILES[name])


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


SMALL_PHOTOS = partial(re.sub, "side=224", "side=32")


def test_images_from_disk(recipe, do, photos):
    """Normalised, in all of their colours, and for training also flipped and cropped."""
    recipe("images", edit=SMALL_PHOTOS)
    job = do(SCRIPT, 1, *photos)
    assert epochs(job.text)[0]["total"] == 9
    assert load(Path("checkpoint.pt"))["model"]["fc.weight"].shape == (3, 512)
    train_set, val_set = job.module.load_photos("photos")
    for channel, mean, std in ((0, 0.485, 0.229), (1, 0.456, 0.224), (2, 0.406, 0.225)):
        found = [photo[channel, 16, 30].item() for photo, name in val_set if name == 2 - channel]
        assert found == 3 * [pytest.approx((1 - mean) / std)]
    crops = [train_set[0][0][2] for _ in range(20)]  # of a blue photo
    assert {crop.shape for crop in crops} == {(32, 32)}
    assert {(crop[16, 31] - crop[16, 0]).sign().item() for crop in crops} >= {-1, 1}
    assert len({crop.sum().item() for crop in crops}) > 10


def test_pretrained_weights(recipe, do, photos, monkeypatch, tmp_path):
    weights, folder = resnet18().state_dict(), tmp_path / "weights" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(weights, folder / Path(ResNet18_Weights.DEFAULT.url).name)
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    recipe("images pretrained", edit=SMALL_PHOTOS)
    do(SCRIPT, 1, *photos, "--lr", 0)
    model = load(Path("checkpoint.pt"))["model"]
    assert torch.equal(model["layer4.1.conv2.weight"], weights["layer4.1.conv2.weight"])
    assert model["fc.bias"].shape == (3,)


def test_mixup_of_training_samples_alone(recipe, do, monkeypatch):
    recipe("mixup")
    seen, loss = [], F.cross_entropy
    see = lambda outputs, targets: seen.append(targets) or loss(outputs, targets)  # noqa: E731
    monkeypatch.setattr(F, "cross_entropy", see)
    for total, *options in ((2, "--snapshot-path", "whole.pt"), (1,), (2, "--resume")):
        do(SCRIPT, total, *SMALL, *options)
    assert same_bytes(load(Path("checkpoint.pt")), load(Path("whole.pt")))
    mixed = torch.cat(seen[:5])
    assert mixed.shape == (40, 10) and torch.allclose(mixed.sum(dim=1), torch.ones(40))
    assert 0.5 < mixed.max(dim=1)[0].mean() < 0.99
    assert torch.equal(torch.cat(seen[5:7]), make_digits(10, 1).targets)


TEXTS = """@@ texts of unequal lengths, with more of one letter in each class
 def ddp_setup(args):
+    global load_dataset
+    texts = [(n % 2, (n % 2 + 97) * torch.ones(3 + n * n % 37).long()) for n in range(80)]
+    texts = [(torch.cat([text, torch.tensor([99])]), name) for name, text in texts]
+    load_dataset = lambda *_: (texts, texts[:9])
@@
-    model = build_model(args.model, train_set[0][0].shape).to(device)  # your model
+    bag = nn.EmbeddingBag(256, 64, mode="mean", padding_idx=0)
+    model = nn.Sequential(bag, nn.Linear(64, 2)).to(device)
"""


def test_text_of_unequal_length(resumed, do):
    text = resumed("text", TEXTS, arguments=("--lr", 1))[1]
    assert epochs(text)[-1]["correct"] == 9
    padded, labels = do.module(SCRIPT).pad([(torch.tensor([5, 6]), 1), (torch.tensor([7]), 0)])
    assert padded.tolist() == [[5, 6], [7, 0]] and labels.tolist() == [1, 0]


PAIRS = """@@ pairs of digits, and a model that compares them
+def pairs(images):
+    both = [(images[index], images[index // 7]) for index in range(len(images))]
+    return [{"left": x, "right": y, "labels": int(m == n)} for (x, m), (y, n) in both]
+
+
+class Siamese(nn.Linear):
+    def forward(self, left, right):
+        return argparse.Namespace(logits=super().forward((left - 2 * right).flatten(1)))
+
+
 def ddp_setup(args):
@@
-    train_set, val_set = load_dataset(args.dataset, args.data_dir)  # your data
+    train_set, val_set = map(pairs, load_dataset(args.dataset, args.data_dir))
@@
-    model = build_model(args.model, train_set[0][0].shape).to(device)  # your model
+    model = Siamese(784, 2).to(device)
"""


def test_batches_that_are_dicts_or_pairs(resumed, recipe, tmp_path):
    resumed("dicts", DIGITS, PAIRS)
    dicts = load(tmp_path / "checkpoint.pt")["model"]
    old = '{"left": x, "right": y, "labels": int(m == n)}'
    path = recipe("", DIGITS, PAIRS.replace(old, "((x, y), int(m == n))"))
    ((moved, called),) = re.findall(r"`(inputs = \[.*?\])` and `(model\(\*inputs\))`", PAGE, re.S)
    text = re.sub(r"( +)inputs = inputs\.to.*", rf"\1{' '.join(moved.split())}", path.read_text())
    path.write_text(text.replace("model(inputs)", f"{called}.logits"))
    train(tmp_path, path, 2, 2, *SMALL, dtype="float64")
    torch.testing.assert_close(load(tmp_path / "checkpoint.pt")["model"], dicts, rtol=0, atol=1e-12)


TOKENS = """@@ texts of 2 to 9 tokens, and a model that shifts the labels as Hugging Face's do
+def texts(images):
+    ids = [(torch.arange(9) * (n % 3 + 1) + n) % 20 for n in range(len(images))]
+    kept = [torch.arange(9) < 2 + n % 8 for n in range(len(images))]
+    labels = map(torch.where, kept, ids, [torch.tensor(-100)] * len(ids))
+    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)]
+
+
+class Causal(nn.Sequential):
+    def forward(self, input_ids, labels, num_items_in_batch=None):
+        scores, labels = super().forward(input_ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
+        how = "mean" if num_items_in_batch is None else "sum"
+        loss = F.cross_entropy(scores, labels, reduction=how)
+        return argparse.Namespace(loss=loss / (1 if how == "mean" else num_items_in_batch))
+
+
 def ddp_setup(args):
@@
-    train_set, val_set = load_dataset(args.dataset, args.data_dir)  # your data
+    train_set, val_set = map(texts, load_dataset(args.dataset, args.data_dir))
@@
-    model = build_model(args.model, train_set[0][0].shape).to(device)  # your model
+    model = Causal(nn.Embedding(20, 8), nn.Linear(8, 20)).to(device)
"""


def test_a_causal_language_model_is_that_of_one_process(resumed):
    """Each rank has other numbers of tokens; the next one can be told from the last."""
    first, last = epochs(resumed("dicts causal", DIGITS, TOKENS, batch=(8,))[1])
    assert last["val_loss"] < first["val_loss"] and last["accuracy"] == 0


def test_rare_classes_are_drawn_as_often_as_others(resumed, do):
    resumed("rare", DIGITS)
    data = make_digits(1001, 0)
    data.targets = (data.targets == 0).long()  # 101 of 1,001
    shares = []
    for epoch in (3, 4):
        for rank in range(2):
            sampler = do.module(SCRIPT).Balanced(data, num_replicas=2, rank=rank, seed=7)
            sampler.set_epoch(epoch)
            shares.append([*sampler])
            assert len(shares[-1]) == len(sampler) == 501
    assert 450 < data.targets[shares[0] + shares[1]].sum() < 550
    assert shares[0] != shares[1] and shares[:2] != shares[2:]


def test_whole_batches(resumed):
    """Of 90 samples, 80 are trained on in five steps."""
    more = DIGITS.replace("make_digits(80, 0)", "make_digits(90, 0)")
    assert "Epoch 1 | Batchsize: 16 | Steps: 5\n" in resumed("whole", more)[1]


def test_a_stream_trains_on_each_sample_once(run, tmp_path):
    """As one process does that takes the batches of both ranks together."""
    program = ROOT / "recipes" / "stream.py"
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


# --- models, losses and metrics -----------------------------------------------------------------

WOOD = "How much wood would a woodchuck chuck? " * 88  # of 64 bytes 48 blocks to learn, and 5
TINY_GPT = partial(re.sub, "width=128, heads=4, layers=4", "width=16, heads=2, layers=2")


@pytest.fixture
def text(tmp_path):
    """The arguments to train on a short text that repeats itself."""
    (tmp_path / "input.txt").write_text(WOOD)
    return "--data-dir", ".", "--lr", 0.01, "--warm-up", 18, "--cosine", "--clip", 1


def test_gpt_is_that_of_one_process_and_is_resumed(resumed, text):
    """Rounding errors grow in AdamW, which divides by the root of small squares."""
    printed = resumed("gpt", edit=TINY_GPT, arguments=text, save_steps=4, tolerance=1e-10)[1]
    assert re.search("Total time: .*\n\n[\\S\\s]{150}", printed)  # bytes of all kinds


def test_gpt_learns_to_continue_the_text_and_does_not_look_ahead(recipe, do, text):
    recipe("gpt", edit=TINY_GPT)
    job = do(SCRIPT, 30, 30, *text, "--batch-size", 8)
    model, optimizer = job.passes[-1][0].module, job.passes[-1][2]
    matrices, others = optimizer.param_groups
    assert {weights.ndim for weights in matrices["params"]} == {2}
    assert {weights.ndim for weights in others["params"]} == {1}
    assert len(matrices["params"] + others["params"]) == len([*model.parameters()])
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert matrices["lr"] == others["lr"] < 1e-5  # at the end of the cosine
    tokens = torch.tensor([list(WOOD[3088:].encode())])[:, :321]
    blocks, targets = tokens[:, :-1].view(5, 64), tokens[:, 1:].reshape(5, 64)
    scores, last = model.eval()(blocks), epochs(job.text)[-1]
    loss = F.cross_entropy(scores.transpose(1, 2).reshape(-1, 256), targets.flatten())
    assert last["val_loss"] == pytest.approx(loss.item(), abs=1e-4) and loss < 0.5
    share = (scores.argmax(1) == targets).float().mean().item()
    assert last["accuracy"] == pytest.approx(100 * share, abs=0.01) and share > 0.75
    written = model.generate("How much wood", 200)
    pairs = [one + other in WOOD for one, other in pairwise(written)]
    assert written.startswith("How much wood") and sum(pairs) > 0.9 * len(pairs) > 150
    changed = blocks[:1].clone()
    changed[0, 40] += 1
    for mode in (model.train(), model.eval()):
        with torch.no_grad():
            equal = torch.isclose(mode(blocks[:1]), mode(changed), atol=1e-5).all(dim=1)[0]
        assert equal.tolist() == 40 * [True] + 24 * [False]


def test_both_models_of_a_gan_are_those_of_one_process_and_are_resumed(resumed):
    edit = partial(re.sub, r"torch.randn\(len\(real\), 64, .*?\)", "real.flatten(1)[:, :64]")
    snapshot, printed = resumed("gan", DIGITS, edit=edit, arguments=("--lr", 0.001), tolerance=1e-9)
    assert len(snapshot["optimizer"]["state"]) == 4 + 6
    found = re.findall(r"Critic loss: (\S+) \| Generator loss: (\S+)", printed)
    assert len(found) == 2 and all(0.01 < float(loss) < 5 for pair in found for loss in pair)


def test_each_model_of_a_gan_learns_from_its_own_loss(recipe, do):
    recipe("gan")
    gan, real = do.module(SCRIPT).GAN(), torch.randn(8, 1, 28, 28)
    generator, critic = gan.generator, gan.critic
    torch.manual_seed(1)
    found = torch.autograd.grad(gan(real).sum(), [*gan.parameters()])
    torch.manual_seed(1)
    made = generator(torch.randn(8, 64))
    loss = F.softplus(-critic(made)).mean()
    expected = torch.autograd.grad(loss, [*generator.parameters()], retain_graph=True)
    loss = F.softplus(-critic(real)).mean() + F.softplus(critic(made)).mean()
    expected += torch.autograd.grad(loss, [*critic.parameters()])
    torch.testing.assert_close(found, expected)


def test_contrastive_loss_is_that_of_one_large_batch(resumed, do, monkeypatch):
    # Without random numbers, of which each rank draws its own, but with two views that differ.
    edit = partial(re.sub, r"views \+ .*views\)", "torch.cat([inputs, inputs.flip(3)])")
    printed = resumed("contrastive", DIGITS, edit=edit, batch=(8,))[1]
    assert "| Train loss: " in printed and "Val loss" not in printed
    module = do.module(SCRIPT)
    monkeypatch.setattr(module.Gather, "apply", lambda rows: rows)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    views = torch.randn(8, 16, dtype=torch.float64)  # four images
    first, second = views.chunk(2)
    scores = 10 * F.cosine_similarity(first[:, None], second[None], dim=2)
    expected = -scores.log_softmax(dim=1).diag().mean().item()
    assert module.contrastive_loss(views).item() == pytest.approx(expected)


MASKS = """@@ masks of digits, with a frame of another height in each that does not count
+def masks(images):
+    samples = []
+    for index in range(len(images)):
+        image, digit = images[index]
+        mask = torch.where(image[0] > 0, digit % 9 + 1, 0)
+        mask[: index % 9] = -100
+        samples.append((image, mask))
+    return samples
+
+
 def ddp_setup(args):
@@
-    train_set, val_set = load_dataset(args.dataset, args.data_dir)  # your data
+    train_set, val_set = map(masks, load_dataset(args.dataset, args.data_dir))
@@
-    model = build_model(args.model, train_set[0][0].shape).to(device)  # your model
+    model = nn.Conv2d(1, 10, 3, padding=1).to(device)
"""


def test_ignored_targets_and_metrics_of_a_confusion_matrix(resumed, do, recipe, tmp_path):
    """Also where a rank has no validation sample. Printed is what one process finds by hand."""
    snapshot, text = resumed("padded confusion", DIGITS, MASKS)
    module, model = do.module(SCRIPT), nn.Conv2d(1, 10, 3, padding=1).double()
    model.load_state_dict(snapshot["model"])
    images, masks = zip(*module.masks(make_digits(10, 1)), strict=True)
    scores, right = model(torch.stack(images).double()), torch.stack(masks)
    loss, counted = F.cross_entropy(scores, right).item(), right != -100
    guessed, right = scores.argmax(dim=1)[counted], right[counted]
    sums = torch.zeros(2)
    names = {*guessed.tolist(), *right.tolist()}
    for name in names:
        both = ((guessed == name) & (right == name)).sum()
        all_of_it = (guessed == name).sum() + (right == name).sum()
        sums += torch.stack([both / (all_of_it - both), 2 * both / all_of_it])
    found = re.findall(r"Mean IoU: (\S+) \| F1: (\S+)", text)[-1]
    assert [*map(float, found)] == pytest.approx((sums / len(names)).tolist(), abs=1e-4)
    last = epochs(text)[-1]
    assert last["val_loss"] == pytest.approx(loss, abs=1e-4)
    assert last["correct"] == (guessed == right).sum() and last["total"] == len(right)
    path = recipe("padded confusion", DIGITS.replace("(10, 1)", "(1, 1)"), MASKS)
    assert len(epochs(train(tmp_path, path, 2, 2, *SMALL))) == 2


NORM = """@@ a model with statistics, of which each rank has its own
-    model = build_model(args.model, train_set[0][0].shape).to(device)  # your model
+    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10))
"""


def test_the_average_is_evaluated_and_resumed(resumed):
    edit = partial(re.sub, r"0\.999", "0.9")
    snapshot, printed = resumed("ema", DIGITS, NORM, edit=edit, one_process=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10)).double().eval()
    inputs, targets = make_digits(10, 1).__getitems__(range(10))
    for prefix, weights, same in (("module.", "ema", True), ("", "model", False)):
        weights = {name.removeprefix(prefix): values for name, values in snapshot[weights].items()}
        weights.pop("n_averaged", None)
        model.load_state_dict(weights)
        loss = F.cross_entropy(model(inputs.double()), targets).item()
        assert (epochs(printed)[-1]["val_loss"] == pytest.approx(loss, abs=1e-4)) == same


def test_the_average_after_each_step(recipe, do, each_step):
    recipe("ema", edit=partial(re.sub, r"0\.999", "0.9"))
    found, vector = [], lambda weights: nn.utils.parameters_to_vector(weights).detach().clone()
    each_step(lambda group: found.append(vector(group["params"])))
    parts = do(SCRIPT, 1, *SMALL, "--batch-size", 4, "--accumulate", 2).passes[0][6]
    first, *others = *found[1:], vector(parts["model"].parameters())
    for weights in others:
        first = 0.9 * first + 0.1 * weights
    assert len(found) == 5 and not torch.allclose(first, others[-1], atol=1e-4)
    torch.testing.assert_close(vector(parts["ema"].parameters()), first)


def test_predictions_come_once_and_in_order(resumed, recipe, tmp_path):
    """Also from a snapshot of a finished run."""
    file, options = tmp_path / "predictions.csv", ("--model", "mlp", "--lr", 0.01)
    resumed("predictions", DIGITS, arguments=options)
    one = file.read_text()
    weights = [*load(tmp_path / "one.pt")["model"].values()]
    hidden = make_digits(10, 1).__getitems__(range(10))[0].double().flatten(1)
    for layer in range(0, 6, 2):
        hidden = F.linear(hidden.relu() if layer else hidden, *weights[layer : layer + 2])
    found = hidden.argmax(dim=1).tolist()
    assert one == "".join(f"{n},{name}\n" for n, name in enumerate(found)) and len({*found}) > 2
    file.unlink()
    train(tmp_path, recipe("predictions", DIGITS), 3, 2, "--resume", *options, dtype="float64")
    assert file.read_text() == one
    small = recipe("predictions", DIGITS.replace("(10, 1)", "(1, 1)"))  # and none for rank 1
    train(tmp_path, small, 2, 2, "--resume", *options)
    assert file.read_text().count("\n") == 1


def test_the_rates_of_a_scheduler_and_of_two_optimizers_are_resumed(resumed, do, each_step):
    """Those of OneCycleLR, which rises and falls; and of the script's cosine, for both."""
    resumed("schedule", DIGITS)
    rates = []
    each_step(lambda group: rates.append(group["lr"]))
    do(SCRIPT, 2, *SMALL)
    assert rates[0] < 0.005 and max(rates) == pytest.approx(0.1, rel=0.1) and rates[-1] < 1e-5
    tiny = NORM.replace("10), nn.BatchNorm1d(10)", "8), nn.Linear(8, 10)")
    resumed("optimizers", DIGITS, tiny, arguments=("--lr", 0.1, "--cosine"), one_process=False)
    parts = do(SCRIPT, 1, "--batch-size", 8, "--cosine").passes[0][6]
    rates = {group["lr"] for name in ("optimizer", "muon") for group in parts[name].param_groups}
    assert len(rates) == 1 and 0 < max(rates) < 0.002
    (hidden,) = parts["muon"].param_groups[0]["params"]
    assert hidden is parts["model"][1].weight
    assert all(weights.grad is None for weights in parts["model"].parameters())


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
    scored("best", [9], 1)
    assert load(Path("checkpoint.pt.best"))["epoch"] == 1  # of this run


def test_early_stopping_counts_on_in_a_resumed_run(scored):
    """A NaN is no improvement, and no lowest loss either; what has stopped stays stopped."""
    losses = [3, 2, 2.5, 2, 1, 1, math.nan, 4]  # the last three are no better
    scored("best early", losses, 9, 9, "--snapshot-path", "whole.pt")
    for total, first, passes in ((7, 0, 7), (9, 7, 1), (9, 8, 0)):
        assert len(scored("best early", losses[first:], total, 9, "--resume").passes) == passes
    whole, resumed = load(Path("whole.pt")), load(Path("checkpoint.pt"))
    assert whole["epoch"] == resumed["epoch"] == 8 and same_bytes(resumed, whole)


def test_a_test_set_is_for_the_best_snapshot_that_all_ranks_have(recipe, do, tmp_path):
    """Also where rank 0 is slow to save it. The split is the same in a resumed run."""
    line = "    os.replace(f"
    slow = f"@@\n+    time.sleep(3 * (epoch == 2) * args.snapshot_path.endswith('.best'))\n {line}"
    slow += '"{args.snapshot_path}.tmp", args.snapshot_path)  # a crash leaves the old or the new\n'
    told = "@@\n     test_shard = range(rank, len(test_set), world_size)\n"
    told += "+    log(f\"Tested: {snapshot['epoch']} {train_set.indices}\", every_rank=True)\n"
    edit = partial(re.sub, "if val_loss < best.val_loss", "if True")
    path = recipe("best test", DIGITS, slow, told, edit=edit)
    for options in ((), ("--resume",)):
        text = train(tmp_path, path, 2, 2, *SMALL[:4], "--lr", 0.001, *options, dtype="float64")
        tested = re.findall(r"^Tested: (\d) (.*)$", text, re.M)
        assert len(tested) == 2 and len({*tested}) == 1 and tested[0][0] == "2"
        assert len({*json.loads(tested[0][1])}) == 72
    model = do.module(SCRIPT).build_model("mlp", (1, 28, 28)).double()
    model.load_state_dict(load(tmp_path / "checkpoint.pt.best")["model"])
    inputs, targets = make_digits(10, 1).__getitems__(range(10))
    outputs = model(inputs.double())
    found = F.cross_entropy(outputs, targets), (outputs.argmax(1) == targets).double().mean()
    assert "Test loss: {:.4f} | Accuracy: {:.2%}\n".format(*map(float, found)) in text


@pytest.mark.slow("a real torchrun")
@pytest.mark.parametrize(("whom", "status"), [("torchrun", 1), ("rank 1", 0)])
def test_a_stop_that_saves_at_once(recipe, fashion, start, tmp_path, whom, status):
    """After ten steps or more. The loader's workers ignore the signal, as the page says."""
    (ignore,) = re.findall(r"`(signal\.signal.*?)`", PAGE)
    path = recipe("stop")
    shutil.copytree(ROOT / "common", path.parent / "common")
    loader = path.parent / "common" / "loader.py"
    lines = f"@@\n def _end_with_the_rank(worker_id: int) -> None:\n+    {ignore}\n"
    loader.write_text(patched(loader.read_text(), lines + "@@\n import os\n+import signal\n"))
    options = (1, *fashion(800, 10), "--batch-size", 8, "--log-interval", 1)
    train(tmp_path, SCRIPT, 2, *options, "--snapshot-path", "whole.pt")
    launch = f"torchrun --standalone --nproc_per_node=2 {path}"
    workers = ("--num-workers", 1) if whom == "torchrun" else ()
    job = start(launch, *options, *workers, LADDER_SLOW="0:0.1")
    job.wait_for(r"Epoch 0 \| Step 12 ")
    os.kill(job.process.pid if whom == "torchrun" else job.workers()[1], signal.SIGTERM)
    text = job.finish(status)
    assert len(re.findall(r"^Epoch 0 \| Step \d+ \| Saved at checkpoint.pt$", text, re.M)) == 1
    assert 'ddp_torchrun.py", line' not in text, text  # torchrun shows a traceback of its own
    whole, stopped = load(tmp_path / "whole.pt"), load(tmp_path / "checkpoint.pt")
    assert stopped["samples_seen"] in (320, 480, 640) and not same_bytes(stopped, whole)
    train(tmp_path, path, 2, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), whole)


def test_deterministic_kernels_are_chosen_before_the_process_group(recipe, do, monkeypatch):
    recipe("deterministic")
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":16:8")  # a user's own stays
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            do(SCRIPT)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":16:8"
        with pytest.raises(ZeroDivisionError):
            do(SCRIPT)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_inference(do, capsys):
    job = do(SCRIPT, 1, *SMALL)
    (classify,) = re.findall(r"```python classify.py\n(.*?)```", PAGE, re.S)
    names = {}
    exec(classify, names)
    model, (images, targets) = names["model"], names["samples"].__getitems__(range(2000))
    right = (model(images).argmax(1) == targets).sum()
    assert capsys.readouterr().out == f"{right} of 2000\n"
    assert all(map(torch.equal, model.parameters(), job.model.parameters()))


@every_script
def test_tensorboard_shows_each_epoch_once(recipe, do, monkeypatch, script):
    """Also one that was trained after the snapshot, and is trained again; from rank 0 alone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # File names end with the writer's number in this process, and 10 would be read before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", Mock(**{"get.side_effect": range(9)}))
    ranks = script not in ("single_gpu.py", "data_parallel.py")
    edit = str if ranks else partial(re.sub, r"(?=\+    if rank)", "+    rank = 0\n", count=1)
    recipe("tracker", script=script, edit=edit)
    text = do(script, 1, *SMALL).text
    first = Path("checkpoint.pt").read_bytes()
    for total in (2, 3):
        Path("checkpoint.pt").write_bytes(first)
        text += do(script, total, *SMALL, "--resume").text
    events = EventAccumulator("runs").Reload()
    for name in ("loss/train", "loss/val", "accuracy"):
        assert [event.step for event in events.Scalars(name)] == [0, 1, 2]
    printed = {epoch["epoch"]: epoch["val_loss"] for epoch in epochs(text)}
    shown = {event.step: round(event.value, 4) for event in events.Scalars("loss/val")}
    assert shown == pytest.approx(printed, abs=1e-4)


def test_rank_0_alone_has_a_tracker_and_each_rank_a_profile(recipe, fashion, tmp_path):
    path = recipe("tracker profile")
    train(tmp_path, path, 2, 1, *fashion(200, 8), "--batch-size", 8)
    assert len([*(tmp_path / "runs").iterdir()]) == 1
    for rank in range(2):
        events = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {"gloo:all_reduce", "Optimizer.step#SGD.step"} <= names, names


@pytest.mark.slow("a real torchrun")
def test_a_debugger_in_one_rank(recipe, tmp_path):
    path = recipe("breakpoint", DIGITS)
    words = command(f"torchrun --standalone --nproc_per_node=2 {path}", 1, *SMALL)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    typed = "up\np number * 1111\nc\n"
    done = subprocess.run(words, input=typed, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "(Pdb) 3333\n" in done.stdout and "Total time: " in done.stdout, done.stdout


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
        do(SCRIPT, 1, "--batch-size", 8, "--snapshot-path", f"{name}.pt")
        assert found == [layout] * (5 * per_step + 2 * 2)
        found.clear()
    assert same_bytes(load(Path("checkpointing.pt")), load(Path(".pt")))
    assert difference(load(Path("fast.pt")), load(Path(".pt"))) < 1e-4


def test_fp16_and_its_scale_are_resumed(recipe, do, monkeypatch):
    """The scale is doubled after two good steps; a step whose gradients overflow is left out, and
    halves it. Gradients are clipped after the scale is undone."""
    recipe("fp16", edit=partial(re.sub, r"GradScaler\(device.type", r"\g<0>, 64, 2, 0.5, 2"))
    for total, *options in ((3, "--snapshot-path", "whole.pt"), (1,), (3, "--resume")):
        job = do(SCRIPT, total, *SMALL, "--amp", *options)
    whole, resumed = load(Path("whole.pt")), load(Path("checkpoint.pt"))
    assert same_bytes(resumed, whole) and resumed["scaler"] == whole["scaler"]
    assert whole["scaler"]["scale"] == 64 * 2**7  # 15 good steps
    plain = do(SCRIPT, 3, *SMALL, "--snapshot-path", "plain.pt")
    losses = [[epoch["train_loss"] for epoch in epochs(run.text)] for run in (job, plain)]
    # Processors round fp16 differently. If the scale were not undone, the rate would be 64 times
    # as high.
    assert losses[0] == pytest.approx(losses[1][1:], rel=0.2)
    model, _, optimizer, device, epoch, args, parts, done = job.passes[-1]
    vector = nn.utils.parameters_to_vector
    before = vector(model.parameters()).detach().clone()
    batches = type("Loader", (list,), {"sampler": range(8), "pin_memory": False})
    args.clip, optimizer.param_groups[0]["momentum"] = 1.0, 0
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for size, norm in ((1e6, 0), (3, 0.1)):  # the latter is the rate times --clip
        loader = batches([(size * torch.randn(8, 1, 28, 28), torch.zeros(8).long())])
        do.module(SCRIPT).train_epoch(model, loader, optimizer, device, epoch, args, parts, done)
        moved = (vector(model.parameters()) - before).norm().item()
        assert moved == pytest.approx(norm, rel=1e-2)
        assert parts["scaler"].get_scale() == 64 * 2**6


def test_gradients_in_bf16(recipe, do, each_step):
    found = []
    each_step(lambda group: found.append(group["params"][-1].grad.clone()))
    for name in ("", "bf16"):
        recipe(name)
        do(SCRIPT, 1, *SMALL)
    plain, rounded = found[0], found[5]
    assert torch.equal(rounded, plain.bfloat16().float()) and not torch.equal(rounded, plain)
