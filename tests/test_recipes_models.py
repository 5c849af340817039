"""docs/recipes.md: models, losses and samplers are those of one process, and are resumed."""

import functools
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from helpers.files import load, patched
from helpers.jobs import ROOT, epochs
from helpers.ranks import train
from torch import nn

from common.data import make_digits

pytestmark = pytest.mark.numbers

PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = {path.stem: path.read_text() for path in ROOT.glob("docs/recipes/*.diff")}
RECIPES |= dict(re.findall(r"```diff (\w+)\n(.*?)```", PAGE, re.S))
WOOD = "How much wood would a woodchuck chuck? " * 88  # of 64 bytes 48 blocks to learn, and 5
SMALL = ("--model", "mlp", "--lr", 0.1)
DIGITS = """@@ 80 digits in place of 12,000
 from common.seed import set_seed, use_deterministic_kernels
+from common.data import make_digits
+
+load_dataset = lambda *_: (make_digits(80, 0), make_digits(10, 1))
"""
KEEP = """@@ the snapshot of mid-epoch stays under another name
                 log(f"Epoch {epoch} | Step {step} | Saved at {self.args.snapshot_path}")
+                if self.rank == 0:
+                    os.link(self.args.snapshot_path, "middle.pt")
"""


@pytest.fixture
def script(tmp_path):
    """script(recipe, *diffs) -> the path of ddp_torchrun.py with these changes, in this order."""

    def script(recipe: str, *diffs: str) -> Path:
        text = (ROOT / "ddp_torchrun.py").read_text()
        for diff in (RECIPES.get(recipe, recipe), *diffs):
            text = patched(text, diff)
        folder = tmp_path / f"script{len([*tmp_path.glob('script*')])}"
        folder.mkdir()
        (folder / "ddp_torchrun.py").write_text(text)
        return folder / "ddp_torchrun.py"

    return script


@pytest.fixture
def resumed(script, tmp_path):
    """resumed(recipe, *diffs, arguments) -> the last snapshot and the output of one process.

    It ends as two ranks do, which take its batch of 16 samples in four micro-batches, and as they
    do when they go on from a snapshot of epoch 1's first step. All in double precision.
    """

    def resumed(
        recipe: str,
        *diffs: str,
        arguments: tuple = SMALL,
        batch: tuple = (4, "--accumulate", 2),
        save_steps: int = 6,
        one_process: bool = True,
        tolerance: float = 1e-12,
    ) -> tuple:
        path = script(recipe, *diffs, KEEP)
        two = (2, 2, *arguments, "--batch-size", *batch, "--save-steps", save_steps)
        text = train(tmp_path, path, 2, *two, dtype="float64")
        assert "\nEpoch 1 | Step 1 | Saved at checkpoint.pt\n" in text
        whole = load(tmp_path / "checkpoint.pt")
        middle = load(tmp_path / "middle.pt")
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
        for run in runs[1:]:
            torch.testing.assert_close(run, whole, rtol=0, atol=tolerance)
        return runs[-1], text

    return resumed


@pytest.fixture
def apply(script, make, monkeypatch):
    """apply(recipe, *arguments, diffs=()) -> as make(), of the script with this recipe."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def apply(recipe: str, *arguments: object, diffs: tuple = ()) -> tuple:
        monkeypatch.syspath_prepend(script(recipe, *diffs).parent)
        monkeypatch.setitem(sys.modules, "ddp_torchrun", ModuleType("forgotten after the test"))
        del sys.modules["ddp_torchrun"]
        return make("ddp_torchrun.py", *arguments)

    return apply


@pytest.fixture
def text(tmp_path):
    """The arguments to train on a short text that repeats itself."""
    (tmp_path / "input.txt").write_text(WOOD)
    return "--data-dir", ".", "--lr", 0.01


TINY_GPT = functools.partial(re.sub, r"width=128, heads=4, layers=4", "width=16, heads=2, layers=2")


def test_gpt_is_that_of_one_process_and_is_resumed(resumed, text):
    """Rounding errors grow in AdamW, which divides by the root of small squares."""
    edited = TINY_GPT(RECIPES["gpt"])
    snapshot, printed = resumed(edited, arguments=text, save_steps=4, tolerance=1e-10)
    assert snapshot["schedule"]["last_epoch"] == 6  # steps
    assert re.search("Epoch 1 .*saved at.*\n\n[\\S\\s]{150}", printed)  # bytes of all kinds


def test_gpt_learns_to_continue_the_text(apply, text, capsys):
    _, trainer = apply(TINY_GPT(RECIPES["gpt"]), 30, 30, *text, "--batch-size", 8)
    optimizer, model = trainer.optimizer, trainer.model.module
    rates, norms = [], []

    def look(*_: object) -> None:
        rates.append([group["lr"] for group in optimizer.param_groups])
        norms.append(nn.utils.get_total_norm(weights.grad for weights in model.parameters()))

    optimizer.register_step_pre_hook(look)
    matrices, others = optimizer.param_groups
    assert {weights.ndim for weights in matrices["params"]} == {2}
    assert {weights.ndim for weights in others["params"]} == {1}
    assert len(matrices["params"] + others["params"]) == len([*model.parameters()])
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    trainer.train(30)
    up, cosine = rates[:18], rates[18:]  # 180 steps
    assert up == [[pytest.approx(0.01 * n / 18)] * 2 for n in range(1, 19)]
    assert cosine[0] == [0.01, 0.01] and cosine[81] == [pytest.approx(0.0055)] * 2
    assert cosine == sorted(cosine, reverse=True) and 0.001 < cosine[-1][0] < 0.00101
    assert max(norms) == pytest.approx(1, rel=1e-4) and min(norms) < 0.5
    last = epochs(capsys.readouterr().out)[-1]
    tokens = torch.tensor([list(WOOD[3088:].encode())])[:, :321]
    blocks, targets = tokens[:, :-1].view(5, 64), tokens[:, 1:].reshape(5, 64)
    scores = model.eval()(blocks)
    loss = F.cross_entropy(scores.transpose(1, 2).reshape(-1, 256), targets.flatten())
    assert last["test_loss"] == pytest.approx(loss.item(), abs=1e-4) and loss < 0.5
    share = (scores.argmax(1) == targets).float().mean().item()
    assert last["accuracy"] == pytest.approx(100 * share, abs=0.01) and share > 0.75
    written = model.generate("How much wood", 200)
    pairs = [one + other in WOOD for one, other in itertools.pairwise(written)]
    assert written.startswith("How much wood") and sum(pairs) > 0.9 * len(pairs) > 150


def test_gpt_does_not_look_ahead(apply, text):
    _, trainer = apply("gpt", 1, *text)
    tokens = torch.randint(256, (1, 64))
    changed = tokens.clone()
    changed[0, 40] += 1
    for model in (trainer.model.module.train(), trainer.model.module.eval()):
        with torch.no_grad():
            equal = torch.isclose(model(tokens), model(changed), atol=1e-5).all(dim=1)[0]
        assert equal.tolist() == 40 * [True] + 24 * [False]


def test_contrastive_loss_is_that_of_one_large_batch(resumed, apply):
    module, _ = apply("contrastive", 1, *SMALL)
    views = torch.randn(8, 16, dtype=torch.float64)  # four images
    first, second = views.chunk(2)
    scores = 10 * F.cosine_similarity(first[:, None], second[None], dim=2)
    loss = module.contrastive_loss(views)
    assert loss.item() == pytest.approx(-scores.log_softmax(dim=1).diag().mean().item())
    # Without random numbers, of which each rank draws its own, but with two views that differ.
    edited = RECIPES["contrastive"].replace("views + torch.randn_like(views)", "views")
    edited = edited.replace("[source, source]", "[source, source.flip(3)]")
    _, printed = resumed(edited, DIGITS, batch=(8,))
    assert "| Train loss: " in printed and "Test loss" not in printed


NORM = """@@ a model with statistics, of which each rank has its own
-    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
+    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10))
"""


def test_the_average_is_evaluated_and_resumed(resumed, apply):
    edited = RECIPES["ema"].replace("0.999", "0.9")
    snapshot, printed = resumed(edited, DIGITS, NORM, one_process=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10)).double().eval()
    images = make_digits(10, 1)
    inputs, targets = (images.images - 255 * 0.15) / (255 * 0.20), images.targets
    for prefix, weights, same in (("module.", "ema", True), ("", "model", False)):
        weights = {name.removeprefix(prefix): values for name, values in snapshot[weights].items()}
        weights.pop("n_averaged", None)
        model.load_state_dict(weights)
        loss = F.cross_entropy(model(inputs.double()), targets).item()
        assert (epochs(printed)[-1]["test_loss"] == pytest.approx(loss, abs=1e-4)) == same


def test_the_average_after_each_step(apply):
    options = (*SMALL, "--batch-size", 4, "--accumulate", 2)
    _, trainer = apply(RECIPES["ema"].replace("0.999", "0.9"), 1, *options)
    average, steps = None, 0

    def look(*_: object) -> None:
        nonlocal average, steps
        weights = nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
        average = weights if average is None else 0.9 * average + 0.1 * weights
        steps += 1

    trainer.optimizer.register_step_post_hook(look)
    trainer._run_epoch(0)
    vector = nn.utils.parameters_to_vector
    torch.testing.assert_close(vector(trainer.ema.parameters()), average)
    last = vector(trainer.model.parameters())
    assert steps == 5 and not torch.allclose(average, last, atol=1e-4)


RARE = """@@ eight of class 1, and 72 of class 0
 load_dataset = lambda *_: (make_digits(80, 0), make_digits(10, 1))
+data = load_dataset()
+for part in data:
+    part.targets = (part.targets == 3).long()
+load_dataset = lambda *_: data
"""


def shares(module: ModuleType, size: int, epoch: int, seen: int = 0, **more: object) -> list:
    """What two ranks' samplers give in this epoch after so many samples of both."""
    found = []
    for rank in range(2):
        sampler = module.ResumableSampler(range(size), num_replicas=2, rank=rank, seed=7)
        vars(sampler).update(more)
        sampler.set_epoch(epoch, seen)
        found.append([*sampler])
        assert len(found[-1]) == len(sampler)
    return found


def test_rare_classes_are_drawn_as_often_as_others(resumed, apply):
    resumed("rare", DIGITS, RARE)
    module, trainer = apply("rare", 1, *SMALL)
    assert trainer.train_data.sampler.weights.tolist() == 40 * [0.25]  # four of each digit
    classes = torch.arange(1001) % 10 == 0  # 101 of 1,001
    weights = 1 / classes.long().bincount()[classes.long()]
    one, other = shares(module, 1001, 3, weights=weights)
    assert len(one) == len(other) == 501 and one != other
    assert 450 < classes[one + other].sum() < 550
    assert shares(module, 1001, 3, 100, weights=weights) == [one[50:], other[50:]]
    assert shares(module, 1001, 4, weights=weights) != [one, other]


@pytest.fixture
def texts(tmp_path):
    """The arguments to train on 80 texts of unequal lengths."""
    lines = [f"{n % 2}\t{'ab'[n % 2] * (3 + n * n % 37)}c\n" for n in range(80)]
    (tmp_path / "train.txt").write_text("".join(lines))
    (tmp_path / "val.txt").write_text("".join(lines[:9]))
    return "--data-dir", ".", "--lr", 1


def test_batches_of_like_lengths(resumed, apply, texts):
    resumed("lengths", RECIPES["text"], arguments=texts, batch=(8,))
    module, trainer = apply("lengths", 1, *texts, diffs=(RECIPES["text"],))
    assert trainer.train_data.sampler.lengths == [4 + n * n % 37 for n in range(80)]
    lengths = [n * n % 997 for n in range(1001)]
    more = {"lengths": lengths, "batch_size": 10}
    both = one, other = shares(module, 1001, 3, **more)
    assert len(one) == len(other) == 501 and {*one, *other} == {*range(1001)}
    spread = []
    for first in range(0, 500, 10):
        batch = [lengths[index] for share in both for index in share[first : first + 10]]
        spread.append(max(batch) - min(batch))
    assert max(spread) < 50 and one != sorted(one, key=lengths.__getitem__)  # of 997
    assert shares(module, 1001, 3, 100, **more) == [one[50:], other[50:]]
    assert shares(module, 1001, 4, **more) != [one, other]


def test_both_models_of_a_gan_are_those_of_one_process_and_are_resumed(resumed):
    noise = r"torch.randn\(len\(real\), 64, .*?\)"
    edited = re.sub(noise, "real.flatten(1)[:, :64]", RECIPES["gan"])
    snapshot, printed = resumed(edited, DIGITS, arguments=("--lr", 0.001), tolerance=1e-9)
    assert len(snapshot["optimizer"]["state"]) == 4 + 6
    found = re.findall(r"Critic loss: (\S+) \| Generator loss: (\S+)", printed)
    assert len(found) == 2 and all(0.01 < float(loss) < 5 for pair in found for loss in pair)


def test_each_model_of_a_gan_learns_from_its_own_loss(apply):
    gan = apply("gan", 1)[1].model.module
    real, generator, critic = torch.randn(8, 1, 28, 28), gan.generator, gan.critic
    torch.manual_seed(1)
    found = torch.autograd.grad(gan(real).sum(), [*gan.parameters()])
    torch.manual_seed(1)
    made = generator(torch.randn(8, 64))
    loss = F.softplus(-critic(made)).mean()
    expected = torch.autograd.grad(loss, [*generator.parameters()], retain_graph=True)
    loss = F.softplus(-critic(real)).mean() + F.softplus(critic(made)).mean()
    expected += torch.autograd.grad(loss, [*critic.parameters()])
    torch.testing.assert_close(found, expected)


PAIRS = """@@ pairs of digits, and a model that compares them
+def pairs(images):
+    samples = []
+    for index in range(len(images)):
+        (left, one), (right, other) = images[index], images[index // 7]
+        samples.append({"left": left, "right": right, "labels": int(one == other)})
+    return samples
+
+
+class Siamese(nn.Module):
+    def __init__(self):
+        super().__init__()
+        self.encoder, self.head = nn.Linear(784, 8), nn.Linear(8, 2)
+
+    def forward(self, left, right):
+        left, right = self.encoder(torch.cat([left, right]).flatten(1)).chunk(2)
+        return argparse.Namespace(logits=self.head(left - right))
+
+
 class Trainer:
@@ load_train_objs
-    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
+    train_set, test_set = map(pairs, load_dataset(args.dataset, args.data_dir))
@@ load_train_objs
-    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
+    model = Siamese().to(device)
"""


def test_batches_that_are_dicts_or_pairs(resumed, script, tmp_path):
    resumed("dicts", DIGITS, PAIRS)
    dicts = load(tmp_path / "checkpoint.pt")["model"]
    old = '{"left": left, "right": right, "labels": int(one == other)}'
    path = script("", DIGITS, PAIRS.replace(old, "((left, right), int(one == other))"))
    (moved,) = re.findall(r"`source = (\[.*?\])` and `self\.model\(\*source\)`", PAGE, re.S)
    old, new = "source.to(self.device, non_blocking=self.pin_memory)", " ".join(moved.split())
    text = path.read_text().replace(old, new)
    path.write_text(text.replace("(source)  # your inputs", "(*source).logits"))
    train(tmp_path, path, 2, 2, *SMALL, "--batch-size", 8, dtype="float64")
    torch.testing.assert_close(load(tmp_path / "checkpoint.pt")["model"], dicts, rtol=0, atol=1e-12)


TOKENS = """@@ texts of 2 to 9 tokens, and a model that shifts the labels as Hugging Face's do
+def texts(images):
+    samples = []
+    for index in range(len(images)):
+        ids = (torch.arange(9) * (index % 3 + 1) + index) % 20
+        kept = torch.arange(9) < 2 + index % 8
+        samples.append({"input_ids": ids, "labels": torch.where(kept, ids, -100)})
+    return samples
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
 class Trainer:
@@ load_train_objs
-    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
+    train_set, test_set = map(texts, load_dataset(args.dataset, args.data_dir))
@@ load_train_objs
-    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
+    model = Causal(nn.Embedding(20, 8), nn.Linear(8, 20)).to(device)
"""


def test_a_causal_language_model_is_that_of_one_process(resumed):
    """Each rank has other numbers of tokens; the next one can be told from the last."""
    text = resumed("dicts", RECIPES["causal"], DIGITS, TOKENS, batch=(8,))[1]
    first, last = epochs(text)
    assert last["test_loss"] < first["test_loss"] and last["accuracy"] == 0


MASKS = """@@ masks of digits, with a frame that does not count
+def masks(images):
+    samples = []
+    for index in range(len(images)):
+        image, digit = images[index]
+        mask = torch.where(image[0] > 0, digit + 1, 0)
+        mask[: index % 9] = 255
+        samples.append((image, mask))
+    return samples
+
+
 class Trainer:
@@ load_train_objs
-    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
+    train_set, test_set = map(masks, load_dataset(args.dataset, args.data_dir))
@@ load_train_objs
-    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
+    model = nn.Conv2d(1, 21, 3, padding=1).to(device)
"""


def test_mean_iou_and_a_loss_per_pixel_are_those_of_one_process(resumed, script, tmp_path):
    """Also where a rank has no test image."""
    snapshot, text = resumed("iou", DIGITS, MASKS, batch=(8,))
    path, options = script("iou", DIGITS, MASKS), (2, *SMALL, "--batch-size", 8)
    again = train(tmp_path, path, 2, *options, "--test-batch-size", 3, dtype="float64")
    found = r"Mean IoU: (\S+)\n.* Test loss: (\S+) \| Accuracy: (\S+) "
    one, two = (re.findall(found, printed) for printed in (text, again))
    assert one == two and len(one) == 2
    model = nn.Conv2d(1, 21, 3, padding=1)
    model.load_state_dict(snapshot["model"])
    guessed, right = [], []
    for index, (image, digit) in enumerate(make_digits(10, 1)):
        mask = torch.where(image[0] > 0, digit + 1, 0)[index % 9 :]
        guessed.append(model(image).argmax(dim=0)[index % 9 :].flatten())
        right.append(mask.flatten())
    guessed, right = torch.cat(guessed), torch.cat(right)
    scores = []
    for name in {*guessed.tolist(), *right.tolist()}:
        found, wanted = guessed == name, right == name
        scores.append(((found & wanted).sum() / (found | wanted).sum()).item())
    assert float(one[-1][0]) == pytest.approx(sum(scores) / len(scores), abs=1e-4)
    path.write_text(path.read_text().replace("make_digits(10, 1)", "make_digits(1, 1)"))
    assert len(epochs(train(tmp_path, path, 2, *options))) == 2


def test_whole_batches(resumed):
    """Of 90 samples, 80 are trained on in five steps."""
    more = DIGITS.replace("make_digits(80, 0)", "make_digits(90, 0)")
    assert "Epoch 1 | Batchsize: 16 | Steps: 5\n" in resumed("whole", more)[1]


def test_predictions_come_once_and_in_order(resumed, script, tmp_path):
    """Also from a snapshot of a finished run."""
    file = tmp_path / "predictions.csv"
    resumed("predictions", DIGITS, arguments=(*SMALL, "--lr", 0.01))
    one = file.read_text()
    images = make_digits(10, 1)
    inputs = (images.images - 255 * 0.15) / (255 * 0.20)
    weights = [*load(tmp_path / "one.pt")["model"].values()]
    hidden = F.relu(F.linear(inputs.double().flatten(1), *weights[:2]))
    scores = F.linear(F.relu(F.linear(hidden, *weights[2:4])), *weights[4:])
    found = scores.argmax(dim=1).tolist()
    assert one == "".join(f"{n},{name}\n" for n, name in enumerate(found)) and len({*found}) > 2
    file.unlink()
    options = (2, "--resume", "--test-batch-size", 3, *SMALL, "--lr", 0.01)
    train(tmp_path, script("predictions", DIGITS), 3, *options, dtype="float64")
    assert file.read_text() == one


def test_zero_is_resumed_to_the_weights_of_sgd(resumed, script, tmp_path):
    snapshot, _ = resumed("zero", DIGITS)
    options = (2, *SMALL, "--batch-size", 16)
    train(tmp_path, script("", DIGITS), 1, *options, dtype="float64")
    plain = load(tmp_path / "checkpoint.pt")
    for part in ("model", "optimizer"):
        torch.testing.assert_close(snapshot[part], plain[part], rtol=0, atol=1e-12)
