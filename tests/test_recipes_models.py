"""docs/recipes_models.md: each change fits the script, does what the page says, and is resumed."""

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

PAGE = (ROOT / "docs" / "recipes_models.md").read_text()
RECIPES = dict(re.findall(r"```diff (\w+)\n(.*?)```", PAGE, re.S))
WOOD = "How much wood would a woodchuck chuck? " * 88  # of 64 bytes 48 blocks to learn, and 5
SMALL = ("--model", "mlp", "--lr", 0.1)
DIGITS = """@@ 80 digits in place of 12,000
 from common.seed import set_seed, use_deterministic_kernels
+from common.data import make_digits
+
+load_dataset = lambda *_: (make_digits(80, 0), make_digits(10, 1))
"""
STOP = """@@ rank 1 alone gets a signal in its first step of epoch 1
             self.samples_seen += samples * self.world_size
+            if epoch == 1 and self.rank == 1:
+                signal.raise_signal(signal.SIGTERM)
@@ and no status that would end the other rank
-    return 143 if stopped else 0  # not 0, because torchrun would report success
+    return 0
"""


def test_every_recipe_is_applied_here():
    code = Path(__file__).read_text()
    assert [name for name in RECIPES if not re.search(rf'"(\w+ )?{name}"', code)] == []


@pytest.fixture
def script(tmp_path):
    """script(recipe, *diffs) -> the path of ddp_torchrun.py with these changes."""

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
    """resumed(recipe, *diffs, arguments) -> the snapshot and the output of one process.

    Two ranks with half its batch stop in mid-epoch, and a second run goes on to the same snapshot,
    in double precision.
    """

    def resumed(
        recipe: str, *diffs: str, arguments: tuple = SMALL, tolerance: float = 1e-12
    ) -> tuple:
        whole = script(recipe, *diffs)
        two = (2, 2, "--batch-size", 8, *arguments)
        text = train(tmp_path, script(recipe, *diffs, STOP), *two, dtype="float64")
        assert "Epoch 1 | Stopped at sample 16, saved" in text
        train(tmp_path, whole, *two, "--resume", dtype="float64")
        one = (1, 2, "--batch-size", 16, "--snapshot-path", "whole.pt", *arguments)
        text = train(tmp_path, whole, *one, dtype="float64")
        runs = [load(tmp_path / name) for name in ("whole.pt", "checkpoint.pt")]
        assert runs[0].pop("args") != runs[1].pop("args")
        torch.testing.assert_close(*runs, rtol=0, atol=tolerance)
        return runs[0], text

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
    snapshot, printed = resumed(TINY_GPT(RECIPES["gpt"]), arguments=text, tolerance=1e-10)
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
