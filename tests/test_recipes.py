"""docs/recipes.md: each change fits the script, and does what the page says of it."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from helpers.files import load, patched
from helpers.jobs import ROOT, Job, epochs

PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = dict(re.findall(r"```diff (\w+)\n(.*?)```", PAGE, re.S))
SMALL = ("--no-progress", "--model", "mlp", "--batch-size", 200)  # 30 steps an epoch on two ranks


@pytest.fixture
def train(tmp_path):
    """train(recipe, arguments) -> the running job of two ranks, in tmp_path."""

    def train(name: str, *arguments: object, edit: tuple[str, str] = ("", "")) -> Job:
        text = patched((ROOT / "ddp_torchrun.py").read_text(), RECIPES[name])
        (tmp_path / "train.py").write_text(text.replace(*edit) if edit[0] else text)
        shutil.copytree(ROOT / "common", tmp_path / "common", dirs_exist_ok=True)
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
        command = [sys.executable, *launch, tmp_path / "train.py", *arguments]
        return Job(list(map(str, command)), tmp_path, {}, fork=True)

    return train


def weights(folder: Path, name: str = "checkpoint.pt") -> torch.Tensor:
    model = load(folder / name)["model"]
    return torch.cat([tensor.flatten() for tensor in model.values()])


def test_every_recipe_is_tested():
    code = Path(__file__).read_text()
    assert len(RECIPES) == 7 and all(f'train("{name}"' in code for name in RECIPES)
    headings = re.findall(r"^## (.*)$", PAGE, re.M)
    assert re.findall(r"^\[(.*)\]\(#", PAGE, re.M) == headings


def test_warm_up_and_cosine_are_resumed_in_mid_epoch(tmp_path, train):
    train("schedule", 3, *SMALL, "--lr", 0.1, "--snapshot-path", "whole.pt").finish()
    assert load(tmp_path / "whole.pt")["optimizer"]["param_groups"][0]["lr"] < 1e-9
    job = train("schedule", 3, *SMALL, "--lr", 0.1, "--log-interval", 1)
    job.wait_for(r"Epoch 1 \| Step 3 ")
    os.killpg(job.process.pid, signal.SIGTERM)
    job.finish(None)
    stopped = load(tmp_path / "checkpoint.pt")
    assert 0 < stopped["samples_seen"] < 12_000 and stopped["epoch"] == 1
    assert 0.05 < stopped["optimizer"]["param_groups"][0]["lr"] < 0.1
    shutil.copy(tmp_path / "checkpoint.pt", tmp_path / "other.pt")
    text = train("schedule", "--resume", "--no-progress").finish()
    assert [line["epoch"] for line in epochs(text)] == [1, 2]
    assert torch.equal(weights(tmp_path), weights(tmp_path, "whole.pt"))
    # With another --lr the rate is where a run with it would be by now: it ends at 0, too.
    train(
        "schedule", "--resume", "--lr", 0.2, "--no-progress", "--snapshot-path", "other.pt"
    ).finish()
    assert load(tmp_path / "other.pt")["optimizer"]["param_groups"][0]["lr"] < 1e-9


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_clipping(tmp_path, train, amp):
    train("clip", 1, *SMALL, "--lr", 0, "--snapshot-path", "start.pt").finish()
    start = weights(tmp_path, "start.pt")
    train("clip", 1, *SMALL, "--amp", amp).finish()
    assert (weights(tmp_path) - start).norm() > 0.1  # clipped to 1, not to 1 / 65,536
    train("clip", 1, *SMALL, "--amp", amp, edit=("max_norm=1.0", "max_norm=1e-6")).finish()
    assert 0 < (weights(tmp_path) - start).norm() < 1e-4


def test_groups_of_adamw_are_resumed(tmp_path, train):
    options = (*SMALL, "--lr", 0.001)
    (line,) = epochs(train("adamw", 1, *options).finish())
    assert line["accuracy"] > 50
    train("adamw", 2, "--resume", "--no-progress").finish()
    train("adamw", 2, *options, "--snapshot-path", "whole.pt").finish()
    groups = load(tmp_path / "checkpoint.pt")["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert torch.equal(weights(tmp_path), weights(tmp_path, "whole.pt"))


def test_recall_is_that_of_all_ranks(train):
    text = train("metric", 2, *SMALL).finish()
    found = [list(map(float, row.split(", "))) for row in re.findall(r"Recall: \[(.*)\]", text)]
    assert [len(row) for row in found] == [10, 10]
    for row, line in zip(found, epochs(text), strict=True):  # the classes are of one size
        assert sum(row) / 10 == pytest.approx(line["accuracy"] / 100, abs=0.001)


def test_the_best_weights_are_kept(tmp_path, train):
    lines = epochs(train("best", 2, *SMALL).finish())
    snapshot = load(tmp_path / "checkpoint.pt")
    assert snapshot["best"] == max(line["correct"] for line in lines) > 1000
    (tmp_path / "best.pt").unlink()
    train("best", 3, "--resume", "--lr", 0, "--momentum", 0, "--no-progress").finish()
    assert not (tmp_path / "best.pt").exists()  # no better than before
    train("best", 1, *SMALL).finish()
    best = load(tmp_path / "best.pt")
    model = load(tmp_path / "checkpoint.pt")["model"]
    assert all(torch.equal(best[name], model[name]) for name in model)


def test_gradients_in_bf16(tmp_path, train):
    train("best", 1, *SMALL, "--snapshot-path", "plain.pt").finish()
    (line,) = epochs(train("bf16", 1, *SMALL).finish())
    assert line["accuracy"] > 30  # ten classes
    moved = (weights(tmp_path) - weights(tmp_path, "plain.pt")).norm()
    assert 1e-4 < moved < 0.05 * weights(tmp_path, "plain.pt").norm()


def test_a_profile_has_the_all_reduce(tmp_path, train):
    text = train("profile", 1, *SMALL).finish()
    assert len(epochs(text)) == 1 and text.count("Self CPU time total") == 1
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"step{rank}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"gloo:all_reduce", "aten::addmm"} <= names


def test_a_snapshot_is_loaded_for_inference(tmp_path, train):
    (line,) = epochs(train("best", 1, *SMALL).finish())
    (code,) = re.findall(r"```python classify.py\n(.*?)```", PAGE, re.S)
    (tmp_path / "classify.py").write_text(code)
    text = Job([sys.executable, str(tmp_path / "classify.py")], tmp_path, {}, fork=True).finish()
    assert text == f"{line['correct']:.0f} of 2000\n"
