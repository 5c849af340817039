"""A script turned into one's own project: the lines marked "load your" edited, and no other.

Data sets without `__getitems__`, of any length, with workers and augmentation; schedules; models
with other inputs and outputs than one tensor. In double precision, where weights are compared.
"""

import os
import re
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.files import difference, hunks, load, same_bytes
from helpers.jobs import ROOT, SCRIPTS, Job, epochs
from PIL import Image

TORCHRUN2 = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
DOUBLE = {"LADDER_DTYPE": "float64"}
# As tutorials write them: a sample at a time, and no __getitems__.
PLAIN = """class Plain(Dataset):
    def __init__(self, length):
        self.sources = torch.randn(length, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.sources)

    def __getitem__(self, index):
        return self.sources[index], int(self.sources[index].sum() > 0)


class Trainer:
"""
# Random augmentation, in the loader's worker processes.
NOISE = """class Noise(Dataset):
    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 960

    def __getitem__(self, index):
        noise = torch.randn(3)
        if torch.utils.data.get_worker_info():
            with open(self.name, "a") as file:
                print(f"{noise.tolist()}\\n", end="", file=file)
        return noise + index % 2, index % 2


class Trainer:
"""


def edited(
    folder: Path, script: str, edits: list[tuple[str, str]], at_the_marks: list = ()
) -> list[str]:
    """The command that runs a copy of `script` in `folder`, with other lines in some places.

    `edits` have one place each; those `at_the_marks` every line that says "load your".
    """
    text = (ROOT / script).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{script} has this {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    lines = text.splitlines(keepends=True)
    for old, new in at_the_marks:
        hits = [old in line and "# load your " in line for line in lines]
        assert sum(hits) == text.count(old), f"{script} has this without a mark, too:\n{old}"
        lines = [
            line.replace(old, new) if hit else line for line, hit in zip(lines, hits, strict=True)
        ]
    text = "".join(lines)
    (folder / "train.py").write_text(text)
    shutil.copytree(ROOT / "common", folder / "common", dirs_exist_ok=True)
    return [str(folder / "train.py")]


def python(folder: Path, *command: object, status: int = 0, fork: bool = True, **env: str) -> str:
    return Job([sys.executable, *map(str, command)], folder, env, fork=fork).finish(
        status, seconds=300
    )


def own(script: str, dataset: str, model: str, *edits: tuple[str, str]) -> list[tuple[str, str]]:
    """The edits that put in a data set (a class before Trainer) and a model of one's own."""
    build = "build_model(args.model, train_set[0][0].shape)"
    models = [(f"{build}.to", f"{model}.to")]
    if script == "ddp_spawn.py":  # the parent makes one, too
        models.append((f"{build}  #", f"{model}  #"))
    return [("load_dataset(args.dataset, args.data_dir)  #", f"{dataset}  #"), *models, *edits]


def flowers(folder: Path) -> None:
    """Photographs of three flowers: each is of a colour of its own."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 20), ("val", 7)):
        for channel, name in enumerate(("poppy", "cornflower", "clover")):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 128, (50, 70, 3))
                pixels[..., channel] += 100
                Image.fromarray(pixels.astype("u1")).save(folder / part / name / f"{number}.png")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("single_gpu.py", marks=pytest.mark.slow("20 s; test_recipes.py trains, too")),
        "data_parallel.py",
        pytest.param("ddp_spawn.py", marks=pytest.mark.slow("30 s; test_recipes.py trains, too")),
        "multinode.py",
    ],
)
def test_the_recipe_for_images_fits_every_script(tmp_path, script):
    """docs/recipes.md has it for ddp_torchrun.py, which test_recipes.py trains."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    edits = hunks(re.search(r"```diff images\n(.*?)```", page, re.S)[1])
    assert len(edits) == 3
    if script == "ddp_spawn.py":  # README says so: the parent makes a model, too
        model = "resnet18(num_classes=len(train_set.classes))"
        edits.append(("build_model(args.model, train_set[0][0].shape)  #", f"{model}  #"))
    flowers(tmp_path / "flowers")
    command = edited(tmp_path, script, [*edits, ("side = 224", "side = 32")])
    if script not in ("single_gpu.py", "ddp_spawn.py"):  # the same lines
        return
    options = ("--data-dir", "flowers", "--batch-size", 8, "--lr", 0.005, "--no-progress")
    options += ("--num-workers", 2)
    fork = script != "ddp_spawn.py"  # there the data set and the model are pickled
    text = python(tmp_path, *command, 2, *options, fork=fork)
    world_size = 1 if script == "single_gpu.py" else 2
    assert text.count(f"Steps: {-(-60 // (8 * world_size))}\n") == 2 * world_size
    resumed = python(tmp_path, *command, 10, *options, "--resume", fork=fork)
    assert "Resuming training from snapshot at Epoch 2, sample 0" in resumed
    lines = epochs(text + resumed)
    assert [(line["epoch"], line["total"]) for line in lines] == [(e, 21) for e in range(10)]
    assert max(line["accuracy"] for line in lines) > 90, text + resumed
    assert load(tmp_path / "checkpoint.pt")["model"]["fc.weight"].shape == (3, 512)


@pytest.mark.parametrize("launch", [("ddp_spawn.py",), (*TORCHRUN2, "ddp_torchrun.py")])
def test_workers_draw_differently_and_a_resumed_run_draws_the_same(tmp_path, launch):
    """Stopped in the middle of an epoch by a signal that all processes get, the workers, too."""
    *words, script = launch
    sets = "Noise('train.txt'), Noise('test.txt')"
    edits = own(script, sets, "nn.Linear(3, 2)", ("class Trainer:\n", NOISE))
    command = (*words, *edited(tmp_path, script, edits), 2, "--no-progress", "--batch-size", 4)
    whole = python(tmp_path, *command, "--num-workers", 2, "--snapshot-path", "whole.pt")
    assert len(epochs(whole)) == 2
    noise = (tmp_path / "train.txt").read_text().splitlines()
    assert len(noise) == len(set(noise)) == 2 * 960

    command = (*command, "--num-workers", 3, "--log-interval", 1)
    job = Job([sys.executable, *map(str, command)], tmp_path, {})
    job.wait_for(r"Epoch 1 \| Step 3 ")
    os.killpg(job.process.pid, signal.SIGTERM)
    text = job.finish(None)
    assert "Epoch 1 | Stopped at sample " in text and "killed by signal" not in text, text
    assert 0 < load(tmp_path / "checkpoint.pt")["samples_seen"] < 960
    python(tmp_path, *command, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


@pytest.mark.parametrize(("length", "workers"), [(1, 0), (65, 0), (65, 2)])
def test_any_length_on_any_number_of_ranks(tmp_path, length, workers):
    """65 over 2 x 16 and 3 x 16, or fewer samples than ranks; with 65 single samples, too."""
    options = (2, "--no-progress", "--num-workers", workers)
    sizes = [(48, 16, 3)] + ([(2, 1, 2)] if workers == 0 else [])
    trace = tmp_path / "trace"
    for whole, size, ranks in sizes:
        runs = {}
        for script, arguments in (
            ("single_gpu.py", ("--batch-size", whole)),
            ("ddp_spawn.py", ("--batch-size", size, "--nproc-per-node", ranks)),
        ):
            dataset = f"Plain({length}), Plain(5)"
            edits = own(script, dataset, "nn.Linear(3, 2)", ("class Trainer:\n", PLAIN))
            shutil.rmtree(trace, ignore_errors=True)
            trace.mkdir()
            env = {**DOUBLE, "LADDER_TRACE": str(trace)}
            command = edited(tmp_path, script, edits)
            (_, line) = epochs(python(tmp_path, *command, *options, *arguments, **env))
            runs[script] = load(tmp_path / "checkpoint.pt"), {**line, "rate": 0}
            lines = [line for path in trace.iterdir() for line in path.read_text().splitlines()]
            words = [line.split() for line in lines]
            seen = Counter(
                index for first, *rest in words if first == str(length) for index in rest
            )
            assert seen == Counter({str(index): 2 for index in range(length)})
        (one, line), (ours, our_line) = runs.values()
        assert difference(ours, one) < 1e-12 and our_line == line and line["total"] == 5


SCHEDULE = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)"


@pytest.mark.parametrize("script", ["single_gpu.py", "ddp_torchrun.py"])
def test_a_schedule_is_one_line_and_resumes_to_the_same_bytes(tmp_path, script):
    edits = own(script, "Plain(200), Plain(5)", "nn.Linear(3, 2)", ("class Trainer:\n", PLAIN))
    edits.append(("torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)", SCHEDULE))
    launch = TORCHRUN2 if script == "ddp_torchrun.py" else ()
    command = (*launch, *edited(tmp_path, script, edits))
    options = ("--lr", 0.1, "--no-progress")
    python(tmp_path, *command, 4, *options, "--snapshot-path", "whole.pt")
    python(tmp_path, *command, 2, *options)
    half = load(tmp_path / "checkpoint.pt")
    python(tmp_path, *command, 4, "--resume", "--no-progress")
    whole, ours = load(tmp_path / "whole.pt"), load(tmp_path / "checkpoint.pt")
    assert same_bytes(ours, whole) and ours["schedule"] == whole["schedule"]
    (group,), (half_group,) = ours["optimizer"]["param_groups"], half["optimizer"]["param_groups"]
    assert half_group["lr"] == pytest.approx(0.075) and group["lr"] == pytest.approx(0.025)
    assert group == whole["optimizer"]["param_groups"][0]


# --- models with other inputs and outputs than one tensor ---------------------------------------

MODEL = """class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.aside = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, one, other):
        hidden = self.body(one * other).relu()
        outputs = {"logits": self.head(hidden)}
        if self.training:  # an auxiliary head
            outputs["aside"] = self.aside(hidden)
        return outputs


class Pairs(Plain):
    def __getitem__(self, index):
        source, target = super().__getitem__(index)
        return (source, source + 1), target


class Trainer:
"""
LOSS = 'F.cross_entropy(output, targets, reduction="sum")'
MICRO_LOSS = LOSS.replace("targets", "micro_targets")


AT_THE_MARKS = [
    (
        "source.to(self.device, non_blocking=self.pinned)",
        "[part.to(self.device, non_blocking=self.pinned) for part in source]",
    ),
    ("self.model(source)", "self.model(*source)"),
    ("self.model(micro_source)", "self.model(*micro_source)"),
    ("self.model.module(source)", "self.model.module(*source)"),
    ("source.tensor_split(parts)", "zip(*(part.tensor_split(parts) for part in source))"),
    (
        f"loss = {LOSS}",
        f"loss = sum({LOSS.replace('(output', '(values')} for values in output.values())",
    ),
    (
        f"loss = {MICRO_LOSS}",
        f"loss = sum({MICRO_LOSS.replace('(output', '(values')} for values in output.values())",
    ),
    (f"loss_sum += {LOSS}", f"loss_sum += {LOSS.replace('(output', '(output[0]')}"),
    ("(output.argmax", "(output[0].argmax"),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_inputs_a_dictionary_of_outputs_and_a_head_for_training(tmp_path, script):
    edits = own(script, "Pairs(100), Pairs(9)", "Own()")
    edits.append(("class Trainer:\n", PLAIN.replace("class Trainer:\n", MODEL)))
    at_the_marks = [
        (old, new.replace("output[0]", "output['logits']")) for old, new in AT_THE_MARKS
    ]
    command = edited(tmp_path, script, edits, at_the_marks)
    launch = TORCHRUN2 if script == "ddp_torchrun.py" else ()
    options = ("--lr", 0.01, "--no-progress", "--snapshot-path")
    whole = epochs(python(tmp_path, *launch, *command, 3, *options, "whole.pt"))
    assert whole[2]["train_loss"] < whole[0]["train_loss"] and whole[2]["total"] == 9
    if script == "single_gpu.py":
        return
    python(tmp_path, *launch, *command, 1, *options, "parts.pt")
    python(tmp_path, *launch, *command, 3, *options, "parts.pt", "--resume")
    whole, parts = load(tmp_path / "whole.pt"), load(tmp_path / "parts.pt")
    assert same_bytes(parts, whole) and "aside.weight" in parts["model"]
