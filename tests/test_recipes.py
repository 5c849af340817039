"""docs/recipes.md: each change fits the script, and does what the page says of it."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.files import difference, load, patched, same_bytes
from helpers.jobs import ROOT, Job, epochs
from PIL import Image

PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = dict(re.findall(r"```diff (\w+)\n(.*?)```", PAGE, re.S))
SMALL = ("--model", "mlp", "--batch-size", 200)  # 30 steps an epoch on two ranks


@pytest.fixture
def train(tmp_path):
    """train(recipe, arguments) -> the running job of two ranks, in tmp_path."""

    def train(name: str, *arguments: object, edits: tuple[tuple[str, str], ...] = (), **env) -> Job:
        text = patched((ROOT / "ddp_torchrun.py").read_text(), RECIPES[name])
        for old, new in edits:
            assert text.count(old) == 1, f"{text.count(old)} times:\n{old}"
            text = text.replace(old, new)
        (tmp_path / "train.py").write_text(text)
        shutil.copytree(ROOT / "common", tmp_path / "common", dirs_exist_ok=True)
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
        command = [sys.executable, *launch, tmp_path / "train.py", *arguments]
        return Job(list(map(str, command)), tmp_path, env, fork=True)

    return train


def stop(job: Job, pattern: str) -> str:
    """What a job prints that is asked to stop when it has printed this."""
    job.wait_for(pattern)
    os.killpg(job.process.pid, signal.SIGTERM)
    return job.finish(None)


def python(folder: Path, name: str, *arguments: str) -> str:
    """What a program of the page prints, in `folder`."""
    (code,) = re.findall(rf"```python {name}\n(.*?)```", PAGE, re.S)
    (folder / name).write_text(code)
    command = [sys.executable, str(folder / name), *arguments]
    return Job(command, folder, {}, fork=True).finish()


def weights(folder: Path, name: str = "checkpoint.pt") -> torch.Tensor:
    model = load(folder / name)["model"]
    return torch.cat([tensor.flatten() for tensor in model.values()])


def test_every_recipe_is_tested():
    code = Path(__file__).read_text()
    assert len(RECIPES) == 10 and all(f'train("{name}"' in code for name in RECIPES)
    headings = re.findall(r"^## (.*)$", PAGE, re.M)
    assert re.findall(r"^\[(.*)\]\(#", PAGE, re.M) == headings


def photos(folder: Path) -> None:
    """Pictures of three classes, each brighter in another of the three colours."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 60), ("val", 9)):
        for channel in range(3):
            (folder / part / f"class{channel}").mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 128, (24, 30, 3))
                pixels[..., channel] += 127
                Image.fromarray(pixels.astype("u1")).save(
                    folder / part / f"class{channel}" / f"{number}.png"
                )


@pytest.mark.slow("five jobs of a ResNet")
def test_images_from_disk_are_resumed_in_mid_epoch(tmp_path, train):
    photos(tmp_path / "photos")
    side = (("side: int = 224", "side: int = 32"),)
    options = (1, "--data-dir", "photos", "--batch-size", 8, "--lr", 0.001)
    text = train("images", *options, "--snapshot-path", "whole.pt", edits=side).finish()
    (line,) = epochs(text)
    assert line["accuracy"] > 60 and line["total"] == 27  # of three classes
    assert load(tmp_path / "whole.pt")["model"]["fc.weight"].shape == (3, 512)
    stop(train("images", *options, "--log-interval", 1, edits=side), r"Epoch 0 \| Step 3 ")
    assert 0 < load(tmp_path / "checkpoint.pt")["samples_seen"] < 180
    workers = ("--num-workers", 2, "--snapshot-path", "workers.pt")
    shutil.copy(tmp_path / "checkpoint.pt", tmp_path / "workers.pt")
    assert len(epochs(train("images", *options, *workers, "--resume", edits=side).finish())) == 1
    assert weights(tmp_path, "workers.pt").isfinite().all()
    train("images", *options, "--resume", edits=side).finish()
    assert torch.equal(weights(tmp_path), weights(tmp_path, "whole.pt"))
    shutil.rmtree(tmp_path / "photos" / "val" / "class2")  # a folder less
    text = train("images", *options, edits=side).finish(1)
    assert text.count("error: photos: train/ and val/ have different folders\n") == 1


def test_warm_up_and_cosine_are_resumed_in_mid_epoch_and_at_another_rate(tmp_path, train):
    options = (3, *SMALL, "--lr", 0.1)
    train("schedule", *options, "--snapshot-path", "whole.pt").finish()
    assert load(tmp_path / "whole.pt")["optimizer"]["param_groups"][0]["lr"] < 1e-9
    stop(train("schedule", *options, "--log-interval", 1), r"Epoch 1 \| Step 3 ")
    stopped = load(tmp_path / "checkpoint.pt")
    assert 0 < stopped["samples_seen"] < 12_000 and stopped["epoch"] == 1
    rate = stopped["optimizer"]["param_groups"][0]["lr"]
    assert 0.05 < rate < 0.1
    shutil.copy(tmp_path / "checkpoint.pt", tmp_path / "other.pt")
    text = train("schedule", *options, "--resume").finish()
    assert [line["epoch"] for line in epochs(text)] == [1, 2]
    assert torch.equal(weights(tmp_path), weights(tmp_path, "whole.pt"))
    # With another --lr the rate is where a run with it would be by now: it ends at 0, too.
    other = (*SMALL, "--lr", 0.2, "--snapshot-path", "other.pt")
    refused = train("schedule", 3, *other, "--resume").finish(1)
    assert refused.count("other.pt was made with --lr 0.1, and this run has 0.2\n") == 1
    assert python(tmp_path, "change_lr.py", "other.pt", "0.2") == ""
    assert load(tmp_path / "other.pt")["optimizer"]["param_groups"][0]["lr"] == 2 * rate
    train("schedule", 2, *other, "--resume").finish()
    half = load(tmp_path / "other.pt")["optimizer"]["param_groups"][0]["lr"]
    assert half == pytest.approx(0.1)
    train("schedule", 3, *other, "--resume").finish()
    assert load(tmp_path / "other.pt")["optimizer"]["param_groups"][0]["lr"] < 1e-9


@pytest.mark.parametrize(
    "amp", [pytest.param("off", marks=pytest.mark.slow("fp16 is quick")), "fp16"]
)
def test_clipping(tmp_path, train, amp):
    train("clip", 1, *SMALL, "--lr", 0, "--snapshot-path", "start.pt").finish()
    start = weights(tmp_path, "start.pt")
    train("clip", 1, *SMALL, "--amp", amp).finish()
    assert (weights(tmp_path) - start).norm() > 0.1  # clipped to 1, not to 1 / 65,536
    train("clip", 1, *SMALL, "--amp", amp, edits=(("max_norm=1.0", "max_norm=1e-6"),)).finish()
    assert 0 < (weights(tmp_path) - start).norm() < 1e-4


@pytest.mark.slow("three jobs")
def test_groups_of_adamw_are_resumed(tmp_path, train):
    options = (*SMALL, "--lr", 0.001)
    (line,) = epochs(train("adamw", 1, *options).finish())
    assert line["accuracy"] > 50
    train("adamw", 2, *options, "--resume").finish()
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


# In the place of wandb: each call is a line in a file.
WANDB = """import json
import os

def write(*call):
    with open("calls", "a") as file:
        print(json.dumps([os.environ["RANK"], *call]), file=file)

class Run:
    def log(self, numbers, step):
        write("log", step, numbers)

    def finish(self):
        write("finish")

def init(project, id, resume, config):
    run = Run()
    run.id = id or os.urandom(4).hex()
    write("init", run.id, resume, config["batch_size"])
    return run
"""


def test_a_resumed_run_goes_on_in_the_tracker(tmp_path, train):
    (tmp_path / "wandb.py").write_text(WANDB)
    text = stop(train("tracker", 2, *SMALL, "--log-interval", 1), r"Epoch 1 \| Step 3 ")
    text += train("tracker", 2, *SMALL, "--resume").finish()
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert {rank for rank, *_ in calls} == {"0"}
    names = ["init", "log", "log", "finish"]
    assert [name for _, name, *_ in calls] == names + names
    starts = [rest for _, name, *rest in calls if name == "init"]
    assert starts == [[starts[0][0], "allow", 200]] * 2
    logged = [rest for _, name, *rest in calls if name == "log"]
    for number, line in enumerate(epochs(text)):
        ((step, losses), (same_step, accuracy)) = logged[2 * number : 2 * number + 2]
        assert step == same_step == line["epoch"] == number
        assert losses["loss/train"] == pytest.approx(line["train_loss"], abs=1e-4)
        assert losses["loss/test"] == pytest.approx(line["test_loss"], abs=1e-4)
        assert accuracy == {"accuracy": line["correct"] / 2_000}
    assert number == 1


def test_the_best_weights_are_kept(tmp_path, train):
    lines = epochs(train("best", 2, *SMALL).finish())
    snapshot = load(tmp_path / "checkpoint.pt")
    assert snapshot["best"] == max(line["correct"] for line in lines) > 1000
    (tmp_path / "best.pt").unlink()
    torch.save({**snapshot, "best": 2_000}, tmp_path / "checkpoint.pt")
    assert len(epochs(train("best", 3, *SMALL, "--resume").finish())) == 1
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


# Half of the training set, and a test set of an odd length.
SEED = "    set_seed(device, args.seed)  # the same weights on every rank\n"
FEWER = """    train_set = torch.utils.data.Subset(train_set, range(6_000))
    test_set = torch.utils.data.Subset(test_set, range(1_999))
"""
FEWER = ((SEED, FEWER + SEED),)
OWN = """        own = sum(parameter.to_local().numel() for parameter in model.parameters())
        os.write(1, f"own: {own}\\n".encode())
"""


@pytest.mark.slow("six jobs")
def test_sharded_weights_are_those_of_ddp(tmp_path, train):
    edits = (*FEWER, ("        self.model = model\n", "        self.model = model\n" + OWN))
    options = (1, "--model", "mlp", "--batch-size", 50, "--accumulate", 2)
    options += ("--test-batch-size", 333, "--log-interval", 1)
    plain = train("best", *options, "--snapshot-path", "plain.pt", edits=FEWER).finish()
    text = train("fully_shard", *options, "--snapshot-path", "whole.pt", edits=edits).finish()
    assert re.findall(r"own: (\d+)", text) == 2 * [str(weights(tmp_path, "whole.pt").numel() // 2)]
    ((line,), (plain_line,)) = epochs(text), epochs(plain)
    assert line["total"] == 1_999 and abs(line["correct"] - plain_line["correct"]) < 4
    assert line["test_loss"] == pytest.approx(plain_line["test_loss"], abs=1e-3)
    assert difference(load(tmp_path / "whole.pt"), load(tmp_path / "plain.pt")) < 1e-5
    stop(train("fully_shard", *options, edits=edits), r"Epoch 0 \| Step 3 ")
    assert 0 < load(tmp_path / "checkpoint.pt")["samples_seen"] < 6_000
    shutil.copy(tmp_path / "checkpoint.pt", tmp_path / "other.pt")
    train("fully_shard", *options, "--resume", edits=edits).finish()
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    # The snapshot is like any other: the script itself resumes it.
    train("best", *options, "--resume", "--snapshot-path", "other.pt", edits=FEWER).finish()
    assert difference(load(tmp_path / "other.pt"), load(tmp_path / "plain.pt")) < 1e-5


def test_a_profile_has_the_all_reduce(tmp_path, train):
    text = train("profile", 1, *SMALL).finish()
    assert len(epochs(text)) == 1 and text.count("Self CPU time total") == 1
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"step{rank}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"gloo:all_reduce", "aten::addmm"} <= names


def test_a_snapshot_is_loaded_for_inference(tmp_path, train):
    (line,) = epochs(train("best", 1, *SMALL).finish())
    assert python(tmp_path, "classify.py") == f"{line['correct']:.0f} of 2000\n"
