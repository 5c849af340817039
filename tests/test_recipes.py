"""docs/recipes.md: each change fits its program, and does what the page says of it."""

import json
import os
import re
import runpy
import shutil
import subprocess
import textwrap
from functools import partial
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
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
MLP = ("--model", "mlp", "--lr", 0.1)
SMALL = (*MLP, "--batch-size", 8)
KEEP = """@@ the snapshot of the first epoch stays under another name
     os.replace(f"{args.snapshot_path}.tmp", args.snapshot_path)  # all or nothing, if it is killed
+    if epochs == 1:
+        os.link(args.snapshot_path, "middle.pt")
"""


def own(code: str) -> str:
    """A hunk with data or a model of a test's own, in place of those that are imported."""
    return "@@\n" + textwrap.indent(code, "+", lambda line: True) + " def ddp_setup(args):\n"


def see(before: str, what: str) -> str:
    """A hunk that prints something before this line."""
    indent = re.match(" *", before)[0]
    return f'@@\n+{indent}print("seen", {what})\n {before}\n'


def digits(count: int) -> str:
    return own(f"""from common.data import make_digits
load_dataset = lambda *_: (make_digits({count}, 0), make_digits(10, 1))
""")


DIGITS = digits(80)
NORM = own("""from torch import nn
build_model = lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10))
""")
TEXTS = own("""texts = [(97 + n % 2) * torch.ones(3 + n * n % 37).long() for n in range(80)]
texts = [(torch.cat([text, torch.tensor([99])]), n % 2) for n, text in enumerate(texts)]
load_dataset = lambda *_: (texts, texts[:9])
bag = torch.nn.EmbeddingBag(256, 64, padding_idx=0)
build_model = lambda *_: torch.nn.Sequential(bag, torch.nn.Linear(64, 2))
""")
DICTS = own("""samples = [{"x": x, "labels": n % 10} for n, x in enumerate(torch.rand(80, 784))]
load_dataset = lambda *_: (samples, samples[:10])
class Model(torch.nn.Linear):
    def forward(self, x):
        return argparse.Namespace(logits=super().forward(x))
build_model = lambda *_: Model(784, 10)
""")
TOKENS = own("""# of which each can be told from the last; texts have 2 to 9, and then padding
samples = [{"input_ids": (torch.arange(9) * 3 + n) % 20} for n in range(80)]
for n, sample in enumerate(samples):
    sample["labels"] = sample["input_ids"].where(torch.arange(9) < 2 + n % 8, -100)
load_dataset = lambda *_: (samples, samples)
class Model(torch.nn.Sequential):
    def forward(self, input_ids):
        return argparse.Namespace(logits=super().forward(input_ids))
build_model = lambda *_: Model(torch.nn.Embedding(20, 32), torch.nn.Linear(32, 20))
""")
MASKS = own("""# with a frame of another height in each that does not count
def masks(count, seed):
    ((images, _),) = make_digits(count, seed).__getitems__(range(count))
    masks = (images[:, 0] > 0).long()
    for index in range(count):
        masks[index, : index % 9] = -100
    return [*zip(images, masks)]
load_dataset = lambda *_: (masks(80, 0), masks(10, 1))
build_model = lambda *_: torch.nn.Conv2d(1, 10, 3, padding=1)
""")
LEARNED = own("""class YourLoss(torch.nn.Linear):
    def __init__(self):
        super().__init__(10, 10)
    def forward(self, outputs, targets):
        return F.cross_entropy(super().forward(outputs), targets)
""")


@pytest.fixture
def recipe(tmp_path):
    """recipe(names, *hunks, script, edit) -> the path of a script with these recipes and hunks.

    `edit` changes the recipes' text first.
    """

    def recipe(names: str, *hunks: str, script: str = SCRIPT, edit=str) -> Path:
        path = tmp_path / f"script{len([*tmp_path.glob('script*')])}" / Path(script).name
        path.parent.mkdir()
        shutil.copy(ROOT / script, path)
        for diff in (*(edit(RECIPES[name]) for name in names.split()), *hunks):
            if diff.startswith("---"):  # git is stricter than `patch`: it takes no changed context
                git = ["git", "apply", "-"]
                subprocess.run(git, input=diff, cwd=path.parent, text=True, check=True)
            else:
                path.write_text(patched(path.read_text(), diff))
        return path

    return recipe


@pytest.fixture
def resumed(recipe, tmp_path):
    """resumed(names, *hunks) -> the last snapshot of a resumed run, and the output of a whole one.

    The whole one has two ranks. The other one goes on after the first of its two epochs, by default
    with one process, which takes the batches of both. Both end with the same snapshot. Rounding
    errors grow in Adam, which divides by the root of small squares.
    """

    def resumed(
        names: str, *hunks: str, edit=str, arguments=MLP, processes=1, dtype="float64"
    ) -> tuple:
        path = recipe(names, *hunks, KEEP, edit=edit)
        options = (2, 1, *arguments, "--batch-size")
        text = train(tmp_path, path, 2, *options, 8, dtype=dtype)
        more = (16 // processes, "--resume", "--snapshot-path", "middle.pt")
        train(tmp_path, path, processes, *options, *more, dtype=dtype)
        whole, last = (load(tmp_path / f"{name}.pt") for name in ("checkpoint", "middle"))
        assert whole["epoch"] == 2
        tolerance = 0 if processes == 2 else {"gan": 1e-9, "gpt": 1e-10}.get(names, 1e-12)
        torch.testing.assert_close(last, whole, rtol=0, atol=tolerance)
        return last, text

    return resumed


def test_every_recipe_is_applied_by_a_test():
    code = "".join(path.read_text() for path in Path(__file__).parent.glob("test_recipes*.py"))
    assert [name for name in RECIPES if not re.search(rf'"(\w+ )*{name}( \w+)*"', code)] == []
    assert [name for name in FILES if f"recipes/{name}.diff)" not in PAGE] == []


PAIR = {"processes": 2}
SINGLE = {"dtype": "float32", **PAIR}
# Without random numbers, of which each rank draws its own.
NO_NOISE = partial(re.sub, r"torch.randn\(len\(real\), 64, .*?\)", "real.flatten(1)[:, :64]")
FLIPPED = partial(re.sub, r"views \+ .*views\)", "torch.cat([inputs, inputs.flip(3)])")
ADAM = {"edit": NO_NOISE, "arguments": ("--lr", 0.001)}
FASTER = {"edit": partial(re.sub, r"0\.999", "0.9"), **PAIR}
DOUBLED = {"edit": partial(re.sub, r"Scaler\(device.type", r"\g<0>, 64, 2, 0.5, 2"), **SINGLE}
RATE = see(8 * " " + "scheduler.step()", 'round(optimizer.param_groups[0]["lr"], 9)')
LOSS = "loss = F.cross_entropy(model(inputs), targets)  # your loss: a mean over the batch"
HALF_DONE = """@@ the lines that set this run's --lr are left
+    for group in optimizer.param_groups:
+        group.update(lr=args.lr, momentum=args.momentum)
     scheduler.load_state_dict(snapshots[0]["scheduler"])
"""
MIXED = see(8 * " " + LOSS, "*targets.shape, float(targets.sum()), bool(targets.max() < 1)")
SCALE = see(12 * " " + LOSS, "scaler.get_scale(), model.module(inputs).dtype")
TRAINED = see(8 * " " + "dist.all_reduce(loss_sum)", "len(others), len(muon.state)")
TWO = NORM.replace("10), nn.BatchNorm1d(10)", "8), nn.Linear(8, 10)")
AVERAGE = see("    model.eval()", "type(model).__name__, int(model.n_averaged)")
CHOSEN = "torch.are_deterministic_algorithms_enabled(), os.environ['CUBLAS_WORKSPACE_CONFIG']"
CHOSEN = see("    model.eval()", CHOSEN)
NAMES = see("    model.eval()", "*[name for name, _ in model.named_parameters()]")
SENT = see("    loss_sum = torch.zeros((), device=device)", "model.will_sync_module_buffers()")
MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")


@pytest.mark.parametrize(
    ("name", "hunks", "pattern", "options"),
    [
        ("text", [TEXTS], "Epoch 1 .* Accuracy: 9/9 ", {"arguments": ("--lr", 1)}),
        ("dicts", [DICTS], r"Epoch 1 .* Accuracy: \d+/10 ", {}),
        ("causal", [TOKENS], r"Epoch 1 .* Accuracy: [5-8]\d/80 ", {"arguments": ("--lr", 0.3)}),
        ("whole", [digits(90)], r"Epoch 1 \| Batchsize: 8 \| Steps: 5\n", {}),
        ("gan", [DIGITS], "Val critic loss: [01]", ADAM),
        ("contrastive", [DIGITS], r"Epoch 1 \| Train loss: [12]\.\d+ \| ", {"edit": FLIPPED}),
        ("criterion", [DIGITS, LEARNED, NAMES], "seen .*criterion.weight", {}),
        ("schedule", [DIGITS, RATE], "seen 0.1\nE(.*\n)*seen 0.05\n", {}),
        ("schedule", [DIGITS, RATE, HALF_DONE], "seen 0.1\nE(.*\n)*seen 0.05\n", {}),
        ("deterministic", [DIGITS, CHOSEN], "seen True :4096:8\n", PAIR),
        ("mixup", [DIGITS, MIXED], "seen 8 10 8.0 True", SINGLE),
        ("ema", [DIGITS, NORM, AVERAGE], "seen Aver.* 10", FASTER),
        ("fast", [DIGITS, NORM, SENT], "seen False", PAIR),
        ("fp16", [DIGITS, SCALE], "seen 1024.0 torch.float16\n(.*\n)*.*Train loss: 1", DOUBLED),
        pytest.param("optimizers", [DIGITS, TWO, TRAINED], "seen 3 1", PAIR, marks=MUON),
    ],
)
def test_the_weights_are_those_of_one_process(resumed, name, hunks, options, pattern):
    """Also in a resumed run, as in those of most tests below. With two processes, to the byte."""
    text = resumed(name, *hunks, **options)[1]
    assert re.search(pattern, text), text


def test_images_from_disk_and_pretrained_weights(recipe, tmp_path):
    """For training also flipped and cropped."""
    for name in ("red", "lime", "blue"):
        photo = Image.new("RGB", (30, 24), name)
        photo.paste("black", (0, 0, 15, 24))  # the left half
        for file in ("train/{}/1.png", "train/{}/2.png", "val/{}/1.png"):
            path = tmp_path / "photos" / file.format(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            photo.save(path)
    weights, folder = resnet18().state_dict(), tmp_path / "weights" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(weights, folder / Path(ResNet18_Weights.DEFAULT.url).name)
    path = recipe("images pretrained", edit=partial(re.sub, "side=224", "side=32"))
    assert epochs(train(tmp_path, path, 2, 1, "--batch-size", 3, "--lr", 0))[0]["total"] == 3
    model = load(tmp_path / "checkpoint.pt")["model"]
    assert torch.equal(model["layer4.1.conv2.weight"], weights["layer4.1.conv2.weight"])
    assert model["fc.weight"].shape == (3, 512)
    sets = runpy.run_path(path)["load_photos"](tmp_path / "photos")
    for photos, random in zip(sets, (True, False), strict=True):
        seen = {photos[0][0].sum().item() for _ in range(20)}
        assert photos[0][0].shape == (3, 32, 32) and (len(seen) > 1) == random


def test_rare_classes_are_drawn_as_often_as_others(resumed, recipe):
    resumed("rare", DIGITS)
    data = make_digits(1001, 0)
    data.targets = (data.targets == 0).long()  # 101 of 1,001
    sampler = runpy.run_path(recipe("rare"))["Balanced"]
    first, second = (list(sampler(data, 2, rank, seed=7)) for rank in range(2))
    assert len(first) == len(second) == 501 and first != second
    assert 450 < data.targets[first + second].sum() < 550


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


def test_gpt_learns_to_continue_a_text(resumed, recipe, tmp_path):
    text = "How much wood would a woodchuck chuck? " * 88  # of 64 bytes 48 blocks to learn, and 5
    (tmp_path / "input.txt").write_text(text)
    tiny = partial(re.sub, "width=128, heads=4, layers=4", "width=16, heads=2, layers=2")
    given = ("--data-dir", ".", "--lr", 0.01)
    resumed("gpt", edit=tiny, arguments=given)
    options = (30, 30, *given, "--batch-size", 4, "--snapshot-path", "learned.pt")
    path = recipe("gpt", edit=tiny)
    printed = train(tmp_path, path, 2, *options)
    assert 80 < epochs(printed)[-1]["accuracy"] <= 100 and printed.count(" wood") > 5


def test_ignored_targets_and_metrics_of_a_confusion_matrix(resumed, recipe):
    """What is printed is what one process finds by hand."""
    snapshot, text = resumed("padded confusion", DIGITS, MASKS, arguments=("--lr", 0.1))
    model = nn.Conv2d(1, 10, 3, padding=1).double()
    model.load_state_dict(snapshot["model"])
    data = runpy.run_path(recipe("", DIGITS, MASKS))["masks"](10, 1)
    images, masks = zip(*data, strict=True)
    outputs, masks = model(torch.stack(images).double()), torch.stack(masks)
    last, loss = epochs(text)[-1], F.cross_entropy(outputs, masks).item()
    found, right = outputs.argmax(dim=1)[masks != -100], masks[masks != -100]
    assert last["val_loss"] == pytest.approx(loss, abs=1e-4)
    assert last["correct"] == (found == right).sum() and last["total"] == len(right)
    scores = []
    for name in {*found.tolist(), *right.tolist()}:
        ours, theirs = found == name, right == name
        both = (ours & theirs).sum().item()
        scores.append((both / (ours | theirs).sum(), 2 * both / (ours.sum() + theirs.sum())))
    expected = torch.tensor(scores).mean(dim=0).tolist()
    printed = re.findall(r"Mean IoU: (\S+) \| F1: (\S+)", text)[-1]
    assert [*map(float, printed)] == pytest.approx(expected, abs=1e-4) and len(scores) > 1


def test_predictions_come_once_and_in_order(recipe, tmp_path):
    """Also from a snapshot of a finished run."""
    file, path = tmp_path / "predictions.csv", recipe("predictions", DIGITS)
    last = epochs(train(tmp_path, path, 2, 2, *SMALL, "--lr", 0.01))[-1]
    expected = file.read_text()
    rows = [[*map(int, line.split(","))] for line in expected.splitlines()]
    numbers, found = torch.tensor(rows).T
    assert numbers.tolist() == [*range(10)]
    assert (found == make_digits(10, 1).targets).sum() == last["correct"] > 0
    file.unlink()
    train(tmp_path, path, 3, 2, *SMALL, "--resume")
    assert file.read_text() == expected


LOSSES = """@@ a NaN is no improvement
         val_loss, correct = sums.tolist()
+        val_loss = (3, 2, 2.5, 2, 1, 1, float("nan"), 4, 0)[epoch]
"""


def test_the_best_snapshot_is_kept_and_early_stopping_counts_on(recipe, tmp_path):
    """In a resumed run, too. The fifth epoch is the best, and what has stopped stays stopped."""
    path = recipe("best early", DIGITS, LOSSES)

    def passes(total: int, name: str = "checkpoint.pt") -> int:
        given = (total, 9, *SMALL, "--resume", "--snapshot-path", name)
        return len(epochs(train(tmp_path, path, 2, *given)))

    assert [passes(5, "whole.pt"), passes(9, "whole.pt")] == [5, 3]
    assert [passes(7), passes(9), passes(9)] == [7, 1, 0]
    names = ("whole.pt", "checkpoint.pt", "whole.pt.best", "checkpoint.pt.best")
    whole, resumed, first, best = (load(tmp_path / name) for name in names)
    assert whole["epoch"] == resumed["epoch"] == 8 and same_bytes(resumed, whole)
    assert best["epoch"] == 5 and same_bytes(best, first) and not same_bytes(best, whole)
    (tmp_path / "checkpoint.pt").unlink()
    assert passes(1) == 1 and load(tmp_path / "checkpoint.pt.best")["epoch"] == 1  # of this run


def test_a_test_set_is_for_the_best_snapshot(recipe, tmp_path):
    path = recipe("best test", DIGITS, LOSSES)
    text = train(tmp_path, path, 2, 3, *SMALL, "--lr", 0.001, dtype="float64")
    best = load(tmp_path / "checkpoint.pt.best")
    model = build_model("mlp", "digits").double()
    model.load_state_dict(best["model"])
    ((inputs, targets),) = make_digits(10, 1).__getitems__(range(10))
    outputs = model(inputs.double()).detach()
    found = F.cross_entropy(outputs, targets), (outputs.argmax(1) == targets).double().mean()
    assert "Test loss: {:.4f} | Accuracy: {:.2%}\n".format(*map(float, found)) in text
    assert best["epoch"] == 2 and "Steps: 5" in text and "/8 (" in text  # 72 to train, and 8


def test_inference(tmp_path, monkeypatch, capsys):
    text = train(tmp_path, SCRIPT, 1, 1, "--model", "mlp")
    (classify,) = re.findall(r"```python classify.py\n(.*?)```", PAGE, re.S)
    monkeypatch.chdir(tmp_path)
    exec(classify, {})
    assert capsys.readouterr().out == f"{epochs(text)[0]['correct']:.0f} of 2000\n"


def test_rank_0_shows_each_epoch_once_and_each_rank_has_a_profile_of_two_steps(recipe, tmp_path):
    """Also an epoch that was trained after the snapshot, and is trained again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, snapshot = recipe("tracker profile", digits(200)), tmp_path / "checkpoint.pt"
    train(tmp_path, path, 2, 1, *SMALL)
    first = snapshot.read_bytes()
    train(tmp_path, path, 2, 2, *SMALL, "--resume")
    snapshot.write_bytes(first)
    last = epochs(train(tmp_path, path, 2, 3, *SMALL, "--resume"))[-1]
    assert len([*(tmp_path / "runs").iterdir()]) == 3
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    for name, value in ("loss/train", "train_loss"), ("loss/val", "val_loss"):
        assert [event.step for event in events.Scalars(name)] == [0, 1, 2]
        assert events.Scalars(name)[-1].value == pytest.approx(last[value], abs=1e-4)
    assert 100 * events.Scalars("accuracy")[-1].value == pytest.approx(last["accuracy"], abs=0.01)
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in trace]
        assert names.count("Optimizer.step#SGD.step") == 2 and "gloo:all_reduce" in names, names


@pytest.mark.slow("a real torchrun")
def test_a_debugger_in_one_rank(recipe, tmp_path):
    path = recipe("breakpoint", DIGITS)
    words = command(f"torchrun --standalone --nproc_per_node=2 {path}", 1, *MLP, "--batch-size", 40)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    typed = "up\np len(targets) * 1111\nc\n"  # in the only step
    done = subprocess.run(words, input=typed, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "(Pdb) 44440\n" in done.stdout and "Epoch 0 | Train loss" in done.stdout, done


LAYOUT = own("""forward = torch.nn.Conv2d.forward
def look(layer, inputs):
    output = forward(layer, inputs)
    print("conv", output.is_contiguous(memory_format=torch.channels_last))
    return output
torch.nn.Conv2d.forward = look
""")


def test_the_layout_of_channels_last_and_checkpointing_change_no_weights(recipe, tmp_path):
    """Dropout draws the same units when it is computed again."""
    for name, per_step, layout in (("", 2, False), ("checkpointing", 4, False), ("fast", 2, True)):
        options = (1, "--batch-size", 8, "--snapshot-path", f"{name}.pt")
        text = train(tmp_path, recipe(name, DIGITS, LAYOUT), 2, *options)
        assert text.count("conv ") == text.count(f"conv {layout}") == 2 * (5 * per_step + 2)
    plain, again, fast = (load(tmp_path / f"{name}.pt") for name in ("", "checkpointing", "fast"))
    assert same_bytes(again, plain) and difference(fast, plain) < 1e-4
    assert fast["optimizer"]["param_groups"][0]["fused"]


REDUCED = "        dist.all_reduce(correct)"
SENDS = """@@
 from torch import nn
+from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
@@
     model = DDP(model)  # needs no device_ids, because the loop moves the inputs itself
+    sent = []
+    hook = lambda group, bucket: sent.append(1) or allreduce_hook(group, bucket)
+    model.register_comm_hook(None, hook)
"""
ALIVE = see(REDUCED, "len(torch.multiprocessing.active_children())")
SCORES = "correct.fill_((2, 6, 4, 6, 4, 4)[epoch] // world_size).item()"  # the second is best
UNTIL = "@@\n-    for epoch in range(first_epoch, 5):\n+    for epoch in range(first_epoch, {}):\n"


@pytest.mark.parametrize(
    ("name", "seen", "shown"),
    [
        ("loop_bf16", "", []),
        ("loop_accumulate", SENDS + see(REDUCED, "len(sent)"), [16, 32, 48]),  # steps
        pytest.param("loop_workers", ALIVE, [8, 8, 8], marks=pytest.mark.slow("starts workers")),
        ("loop_schedule", see(REDUCED, 'optimizer.param_groups[0]["lr"]'), [0.0345, 0.0095, 0]),
        ("loop_best", see(REDUCED, SCORES), [2, 3, 2]),  # and the sixth does not begin
    ],
)
def test_a_change_of_your_loop(recipe, tmp_path, name, seen, shown):
    """Two ranks, stopped after two epochs and resumed, end as one process that never stopped."""
    changed = partial(recipe, name, seen, script=LOOP)
    dtype = "float32" if name == "loop_bf16" else "float64"
    alone, last = tmp_path / "alone", 6 if name == "loop_best" else 5
    alone.mkdir()
    train(tmp_path, changed(UNTIL.format(2)), 2, dtype=dtype)
    second = load(tmp_path / "snapshot.pt")["model"]
    text = train(tmp_path, changed(UNTIL.format(last)), 2, dtype=dtype)
    found = [float(value) for value in re.findall("seen (.*)", text)]
    assert found == pytest.approx(2 * shown, abs=1e-4)
    new = name in ("loop_schedule", "loop_best")  # otherwise, it ends as without the change
    train(alone, changed(UNTIL.format(last)) if new else LOOP, 1, dtype=dtype)
    found, expected = (load(folder / "snapshot.pt") for folder in (tmp_path, alone))
    if name == "loop_bf16":
        assert 1e-5 < difference(found, expected) < 0.05
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    if name == "loop_best":
        assert all(map(torch.equal, load(tmp_path / "best.pt").values(), second.values()))
