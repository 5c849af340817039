"""docs/recipes.md: each change fits the script, and does what the page says of it."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
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
    """resumed(names, *hunks) -> the last snapshot of a resumed run, and the output of a whole one.

    In the whole one, two ranks take the batches of 16 samples in four micro-batches. The other one
    goes on after the first step of its second epoch, by default with one process, which takes each
    batch at once. Both end with the same weights, in double precision.
    """

    def resumed(
        names: str,
        *hunks: str,
        edit=str,
        arguments: tuple = ("--model", "mlp", "--lr", 0.1),
        batch: tuple = (4, "--accumulate", 2),
        save_steps: int = 6,
        processes: int = 1,
        tolerance: float = 1e-12,
    ) -> tuple:
        path = recipe(names, *hunks, KEEP, edit=edit)
        options = (2, 2, *arguments, "--batch-size")
        more = (*batch, "--save-steps", save_steps)
        text = train(tmp_path, path, 2, *options, *more, dtype="float64")
        middle = load(tmp_path / "middle.pt")
        assert middle["epoch"] == 1 and middle["samples_seen"] == 16
        more = (16 // processes, "--resume", "--snapshot-path", "middle.pt")
        train(tmp_path, path, processes, *options, *more, dtype="float64")
        whole, last = (load(tmp_path / f"{name}.pt") for name in ("checkpoint", "middle"))
        for snapshot in (whole, last):
            del snapshot["args"]
            if "scheduler" in snapshot:  # the rest of it has words
                snapshot["scheduler"] = snapshot["scheduler"]["last_epoch"]
        torch.testing.assert_close(last, whole, rtol=0, atol=tolerance)
        return last, text

    return resumed


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
    """For training also flipped and cropped."""
    recipe("images", edit=SMALL_PHOTOS)
    job = do(SCRIPT, 1, *photos)
    assert epochs(job.text)[0]["total"] == 9
    assert load(Path("checkpoint.pt"))["model"]["fc.weight"].shape == (3, 512)
    for photos, random in zip(job.module.load_photos("photos"), (True, False), strict=True):
        seen = {photos[0][0].sum().item() for _ in range(20)}
        assert photos[0][0].shape == (3, 32, 32) and (len(seen) > 1) == random


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
    do(SCRIPT, 1, *SMALL)
    mixed = torch.cat(seen[:5])
    assert mixed.shape == (40, 10) and torch.allclose(mixed.sum(dim=1), torch.ones(40))
    assert 0.5 < mixed.max(dim=1)[0].mean() < 0.99
    assert torch.equal(torch.cat(seen[5:]), make_digits(10, 1).targets)


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


def test_text_of_unequal_length(resumed):
    assert epochs(resumed("text", TEXTS, arguments=("--lr", 1))[1])[-1]["correct"] == 9


DICTS = """@@ pairs of digits, and a model that compares them
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


def test_batches_that_are_dicts(resumed):
    resumed("dicts", DIGITS, DICTS)


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
    samplers = [do.module(SCRIPT).Balanced(data, 2, rank, seed=7) for rank in range(2)]
    first, second = map(list, samplers)
    assert len(first) == len(second) == 501 and first != second
    assert 450 < data.targets[first + second].sum() < 550


def test_whole_batches(resumed):
    """Of 90 samples, 80 are trained on in five steps."""
    more = DIGITS.replace("make_digits(80, 0)", "make_digits(90, 0)")
    assert "Epoch 1 | Batchsize: 4 | Steps: 5\n" in resumed("whole", more)[1]


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
    assert epochs(job.text)[-1]["val_loss"] < 0.5
    model = job.passes[-1][0].module.eval()
    written = model.generate("How much wood", 200)
    pairs = [one + other in WOOD for one, other in pairwise(written)]
    assert written.startswith("How much wood") and sum(pairs) > 0.9 * len(pairs) > 150
    block = torch.tensor([list(WOOD[:64].encode())])
    changed = block.clone()
    changed[0, 40] += 1
    with torch.no_grad():
        equal = torch.isclose(model(block), model(changed), atol=1e-5).all(dim=1)[0]
    assert equal.tolist() == 40 * [True] + 24 * [False]


def test_both_models_of_a_gan_are_those_of_one_process_and_are_resumed(resumed):
    edit = partial(re.sub, r"torch.randn\(len\(real\), 64, .*?\)", "real.flatten(1)[:, :64]")
    snapshot, printed = resumed("gan", DIGITS, edit=edit, arguments=("--lr", 0.001), tolerance=1e-9)
    assert len(snapshot["optimizer"]["state"]) == 4 + 6
    found = re.findall(r"Critic loss: (\S+) \| Generator loss: (\S+)", printed)
    assert len(found) == 2 and all(0.01 < float(loss) < 5 for pair in found for loss in pair)


def test_contrastive_loss_is_that_of_one_large_batch(resumed):
    # Without random numbers, of which each rank draws its own, but with two views that differ.
    edit = partial(re.sub, r"views \+ .*views\)", "torch.cat([inputs, inputs.flip(3)])")
    printed = resumed("contrastive", DIGITS, edit=edit, batch=(8,))[1]
    first, last = map(float, re.findall(r"\| Train loss: (\S+)", printed))
    assert 0 < last < first


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


def test_ignored_targets_and_metrics_of_a_confusion_matrix(resumed, do):
    """What is printed is what one process finds by hand."""
    snapshot, text = resumed("padded confusion", DIGITS, MASKS)
    model = nn.Conv2d(1, 10, 3, padding=1).double()
    model.load_state_dict(snapshot["model"])
    images, masks = zip(*do.module(SCRIPT).masks(make_digits(10, 1)), strict=True)
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


NORM = """@@ a model with statistics, of which each rank has its own
-    model = build_model(args.model, train_set[0][0].shape).to(device)  # your model
+    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10))
"""


def test_the_average_is_evaluated_and_resumed(resumed):
    edit = partial(re.sub, r"0\.999", "0.9")
    snapshot, printed = resumed("ema", DIGITS, NORM, edit=edit, batch=(8,), processes=2)
    assert snapshot["ema"]["n_averaged"] == 10  # steps
    average = torch.optim.swa_utils.AveragedModel(
        nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10))
    )
    average.double().load_state_dict(snapshot["ema"])
    inputs, targets = make_digits(10, 1).__getitems__(range(10))
    loss = F.cross_entropy(average.eval()(inputs.double()), targets).item()
    assert epochs(printed)[-1]["val_loss"] == pytest.approx(loss, abs=1e-4)
    assert not torch.allclose(snapshot["ema"]["module.1.weight"], snapshot["model"]["1.weight"])


def test_predictions_come_once_and_in_order(resumed, recipe, tmp_path):
    """Also from a snapshot of a finished run."""
    file, options = tmp_path / "predictions.csv", ("--model", "mlp", "--lr", 0.01)
    snapshot, _ = resumed("predictions", DIGITS, arguments=options)
    one = file.read_text()
    model = build_model("mlp", (1, 28, 28)).double()
    model.load_state_dict(snapshot["model"])
    found = model(make_digits(10, 1).__getitems__(range(10))[0].double()).argmax(dim=1).tolist()
    assert one == "".join(f"{n},{name}\n" for n, name in enumerate(found)) and len({*found}) > 2
    file.unlink()
    train(tmp_path, recipe("predictions", DIGITS), 3, 2, "--resume", *options, dtype="float64")
    assert file.read_text() == one


def test_the_rates_of_a_scheduler_are_resumed(resumed, do, monkeypatch):
    """Those of OneCycleLR, which rises and falls."""
    resumed("schedule", DIGITS)
    rates, step = [], torch.optim.SGD.step
    new = lambda own: rates.append(own.param_groups[0]["lr"]) or step(own)  # noqa: E731
    monkeypatch.setattr(torch.optim.SGD, "step", new)
    do(SCRIPT, 2, *SMALL)
    assert rates[0] < 0.005 and max(rates) == pytest.approx(0.1, rel=0.1) and rates[-1] < 1e-5


def test_two_optimizers_are_resumed(resumed, do):
    tiny = NORM.replace("10), nn.BatchNorm1d(10)", "8), nn.Linear(8, 10)")
    resumed("optimizers", DIGITS, tiny, arguments=("--lr", 0.1, "--cosine"), processes=2)
    parts = do(SCRIPT, 1, "--batch-size", 8, "--cosine").passes[0][6]
    (hidden,) = parts["muon"].param_groups[0]["params"]
    assert hidden is parts["model"][1].weight


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
    assert load(Path("checkpoint.pt.best.old"))["epoch"] == 5


def test_early_stopping_counts_on_in_a_resumed_run(scored):
    """A NaN is no improvement, and no lowest loss either; what has stopped stays stopped."""
    losses = [3, 2, 2.5, 2, 1, 1, math.nan, 4]  # the last three are no better
    scored("best early", losses, 9, 9, "--snapshot-path", "whole.pt")
    for total, first, passes in ((7, 0, 7), (9, 7, 1), (9, 8, 0)):
        assert len(scored("best early", losses[first:], total, 9, "--resume").passes) == passes
    whole, resumed = load(Path("whole.pt")), load(Path("checkpoint.pt"))
    assert whole["epoch"] == resumed["epoch"] == 8 and same_bytes(resumed, whole)


def test_a_test_set_is_for_the_best_snapshot(recipe, tmp_path):
    path = recipe("best test", DIGITS)
    text = train(tmp_path, path, 2, 2, *SMALL[:4], "--lr", 0.001, dtype="float64")
    model = build_model("mlp", (1, 28, 28)).double()
    model.load_state_dict(load(tmp_path / "checkpoint.pt.best")["model"])
    inputs, targets = make_digits(10, 1).__getitems__(range(10))
    outputs = model(inputs.double()).detach()
    found = F.cross_entropy(outputs, targets), (outputs.argmax(1) == targets).double().mean()
    assert "Test loss: {:.4f} | Accuracy: {:.2%}\n".format(*map(float, found)) in text


@pytest.mark.slow("a real torchrun")
def test_a_stop_that_saves_at_once(recipe, fashion, start, tmp_path):
    """After ten steps or more."""
    path = recipe("stop")
    loader = path.parent / "common" / "loader.py"
    shutil.copytree(ROOT / "common", loader.parent)
    ignore = re.search(r"`(signal\S+ \S+)` as the first line of `_end_with_the_rank`", PAGE)[1]
    text = loader.read_text().replace("import os\n", "import os\nimport signal\n")
    loader.write_text(re.sub(r"(def _end_with_the_rank.*\n)", rf"\1    {ignore}\n", text))
    options = (1, *fashion(800, 10), "--batch-size", 8, "--log-interval", 1)
    train(tmp_path, SCRIPT, 2, *options, "--snapshot-path", "whole.pt")
    launch = f"torchrun --standalone --nproc_per_node=2 {path}"
    workers = (*options, "--num-workers", 2)
    job = start(launch, *workers, LADDER_SLOW="0:0.1", PYTHONPATH=ROOT)
    job.wait_for(r"Epoch 0 \| Step 12 ")
    os.kill(job.process.pid, signal.SIGTERM)
    text = job.finish(1)
    assert len(re.findall(r"^Epoch 0 \| Step \d+ \| Saved at checkpoint.pt$", text, re.M)) == 1, (
        text
    )
    assert 'ddp_torchrun.py", line' not in text, text  # torchrun shows a traceback of its own
    whole, stopped = load(tmp_path / "whole.pt"), load(tmp_path / "checkpoint.pt")
    assert stopped["samples_seen"] in (320, 480, 640) and not same_bytes(stopped, whole)
    train(tmp_path, path, 2, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), whole)
    start(launch, *workers, LADDER_RAISE="1:3", PYTHONPATH=ROOT).finish(1, seconds=100)


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
    model, (images, targets) = names["model"], names["samples"].__getitems__(range(2000))
    right = (model(images).argmax(1) == targets).sum()
    assert capsys.readouterr().out == f"{right} of 2000\n"
    assert all(map(torch.equal, model.parameters(), job.model.parameters()))


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


def test_fp16_and_its_scale_are_resumed(recipe, do):
    """The scale is doubled after two good steps."""
    recipe("fp16", edit=partial(re.sub, r"GradScaler\(device.type", r"\g<0>, 64, 2, 0.5, 2"))
    for total, *options in ((3, "--snapshot-path", "whole.pt"), (1,), (3, "--resume")):
        job = do(SCRIPT, total, *SMALL, "--amp", *options)
    whole, resumed = load(Path("whole.pt")), load(Path("checkpoint.pt"))
    assert same_bytes(resumed, whole) and resumed["scaler"] == whole["scaler"]
    assert whole["scaler"]["scale"] == 64 * 2**7  # 15 good steps
    plain = do(SCRIPT, 3, *SMALL, "--snapshot-path", "plain.pt")
    # If the scale were not undone, the rate would be 64 times as high.
    last, expected = (epochs(run.text)[-1]["train_loss"] for run in (job, plain))
    assert last == pytest.approx(expected, rel=0.2)
