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


def own(dataset: str, model: str, *edits: tuple[str, str]) -> list[tuple[str, str]]:
    """The edits that put in a data set (a class before Trainer) and a model of one's own."""
    data = ("load_dataset(args.dataset, args.data_dir)  #", f"{dataset}  #")
    return [data, ("build_model(args.model, train_set[0][0].shape).to", f"{model}.to"), *edits]


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
    assert len(edits) == 4
    edits[2] = tuple(line.strip() for line in edits[2])  # the line is indented there
    flowers(tmp_path / "flowers")
    command = edited(tmp_path, script, [*edits, ("side: int = 224", "side: int = 32")])
    if script not in ("single_gpu.py", "ddp_spawn.py"):  # the same lines
        return
    options = ("--data-dir", "flowers", "--batch-size", 8, "--lr", 0.005)
    options += ("--num-workers", 2)
    fork = script != "ddp_spawn.py"  # there the data set is pickled
    text = python(tmp_path, *command, 2, *options, fork=fork)
    world_size = 1 if script == "single_gpu.py" else 2
    assert text.count(f"Steps: {-(-60 // (8 * world_size))}\n") == 2 * world_size
    resumed = python(tmp_path, *command, 10, *options, "--resume", fork=fork)
    assert "Resuming training from snapshot at Epoch 2" in resumed
    lines = epochs(text + resumed)
    assert [(line["epoch"], line["total"]) for line in lines] == [(e, 21) for e in range(10)]
    assert max(line["accuracy"] for line in lines) > 90, text + resumed
    assert load(tmp_path / "checkpoint.pt")["model"]["fc.weight"].shape == (3, 512)


@pytest.mark.parametrize("launch", [("ddp_spawn.py",), (*TORCHRUN2, "ddp_torchrun.py")])
def test_workers_draw_differently_and_a_resumed_run_without_draws_the_same(tmp_path, launch):
    """Stopped in the middle of an epoch by a signal that all processes get, the workers, too."""
    *words, script = launch
    sets = "Noise('train.txt'), Noise('test.txt')"
    edits = own(sets, "nn.Linear(3, 2)", ("class Trainer:\n", NOISE))
    command = (*words, *edited(tmp_path, script, edits), 2, "--batch-size", 4, "--log-interval", 1)

    def stopped(*arguments: object) -> str:
        job = Job([sys.executable, *map(str, (*command, *arguments))], tmp_path, {})
        job.wait_for(r"Epoch 1 \| Step 3 ")
        os.killpg(job.process.pid, signal.SIGTERM)
        return job.finish(None)

    workers = ("--num-workers", 2, "--snapshot-path", "workers.pt")
    text = stopped(*workers)
    noise = (tmp_path / "train.txt").read_text().splitlines()
    assert len(noise) == len(set(noise)) >= 960 + 2 * 4 * 3
    says = "Stopped at sample " if script == "ddp_torchrun.py" else "stopped: --resume goes on"
    assert says in text and "killed by signal" not in text, text
    assert len(epochs(python(tmp_path, *command, *workers, "--resume"))) == 1

    whole = python(tmp_path, *command, "--snapshot-path", "whole.pt")
    assert len(epochs(whole)) == 2
    stopped()
    seen = load(tmp_path / "checkpoint.pt").get("samples_seen", 0)
    assert 0 < seen < 960 if script == "ddp_torchrun.py" else seen == 0
    python(tmp_path, *command, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


def traced(folder: Path, length: int) -> Counter:
    """How often each sample was fetched, of a data set of this length."""
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines()]
    words = [line.split() for line in lines]
    return Counter(int(index) for first, *rest in words if first == str(length) for index in rest)


@pytest.mark.parametrize(("length", "workers"), [(4, 0), (65, 0), (65, 2)])
def test_any_length_on_any_number_of_ranks(tmp_path, length, workers):
    """65 over 3 x 16, or as few samples that the ranks have 2, 1 and 1."""
    runs = {}
    for script, arguments in (
        ("single_gpu.py", ("--batch-size", 48)),
        ("ddp_spawn.py", ("--batch-size", 16, "--nproc-per-node", 3)),
    ):
        edits = own(f"Plain({length}), Plain(5)", "nn.Linear(3, 2)", ("class Trainer:\n", PLAIN))
        trace = tmp_path / script[:-3]
        trace.mkdir()
        env = {**DOUBLE, "LADDER_TRACE": str(trace)}
        command = edited(tmp_path, script, edits)
        text = python(tmp_path, *command, 2, "--num-workers", workers, *arguments, **env)
        (_, line) = epochs(text)
        runs[script] = load(tmp_path / "checkpoint.pt"), {**line, "rate": 0}
        assert traced(trace, length) == Counter({index: 2 for index in range(length)})
    (one, line), (ours, our_line) = runs.values()
    assert difference(ours, one) < 1e-12 and our_line == line and line["total"] == 5


def test_single_samples_leave_no_rank_without_one(tmp_path):
    """65 over 2 x 1: 32 steps, of which the last has three."""
    edits = own("Plain(65), Plain(5)", "nn.Linear(3, 2)", ("class Trainer:\n", PLAIN))
    command = edited(tmp_path, "ddp_spawn.py", edits)
    (tmp_path / "trace").mkdir()
    env = {"LADDER_TRACE": str(tmp_path / "trace")}
    text = python(tmp_path, *command, 1, "--batch-size", 1, "--nproc-per-node", 2, **env)
    assert text.count("Steps: 32\n") == 2 and epochs(text)[0]["train_loss"] < 2
    assert traced(tmp_path / "trace", 65) == Counter(range(65))
    weights = load(tmp_path / "checkpoint.pt")["model"]["weight"]
    assert weights.isfinite().all()


SCHEDULE = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)"


@pytest.mark.parametrize("script", ["single_gpu.py", "ddp_torchrun.py"])
def test_a_schedule_is_one_line_and_resumes_to_the_same_bytes(tmp_path, script):
    edits = own("Plain(200), Plain(5)", "nn.Linear(3, 2)", ("class Trainer:\n", PLAIN))
    edits.append(("torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)", SCHEDULE))
    launch = TORCHRUN2 if script == "ddp_torchrun.py" else ()
    command = (*launch, *edited(tmp_path, script, edits))
    options = ("--lr", 0.1)
    python(tmp_path, *command, 4, *options, "--snapshot-path", "whole.pt")
    python(tmp_path, *command, 2, *options)
    half = load(tmp_path / "checkpoint.pt")
    python(tmp_path, *command, 4, *options, "--resume")
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
AT_THE_MARKS = [
    (
        "source.to(self.device, non_blocking=self.pinned)",
        "[part.to(self.device, non_blocking=self.pinned) for part in source]",
    ),
    ("self.model(source)", "self.model(*source)"),
    ("self.model(micro_source)", "self.model(*micro_source)"),
    ("self.model.module(source)", "self.model.module(*source)"),
    ("source.tensor_split(parts)", "zip(*(part.tensor_split(parts) for part in source))"),
    *(
        (
            f"loss = F.cross_entropy(output, {targets})",
            f"loss = sum(F.cross_entropy(values, {targets}) for values in output.values())",
        )
        for targets in ("targets", "micro_targets")
    ),
    ("loss_sum += F.cross_entropy(output,", "loss_sum += F.cross_entropy(output['logits'],"),
    ("(output.argmax", "(output['logits'].argmax"),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_inputs_a_dictionary_of_outputs_and_a_head_for_training(tmp_path, script):
    edits = own("Pairs(100), Pairs(9)", "Own()")
    edits.append(("class Trainer:\n", PLAIN.replace("class Trainer:\n", MODEL)))
    command = edited(tmp_path, script, edits, AT_THE_MARKS)
    launch = TORCHRUN2 if script == "ddp_torchrun.py" else ()

    def train(total_epochs: int, path: str, *resume: str) -> str:
        options = (total_epochs, "--lr", 0.01, "--snapshot-path", path, *resume)
        if script == "multinode.py":
            store = f"file://{tmp_path}/store{total_epochs}{path}"  # a new one for each run
            options += ("--init-method", store, "--rank", 0, "--world-size", 1)
        return python(tmp_path, *launch, *command, *options)

    whole = epochs(train(3, "whole.pt"))
    assert whole[2]["train_loss"] < whole[0]["train_loss"] and whole[2]["total"] == 9
    train(1, "parts.pt")
    assert len(epochs(train(3, "parts.pt", "--resume"))) == 2
    whole, parts = load(tmp_path / "whole.pt"), load(tmp_path / "parts.pt")
    assert same_bytes(parts, whole) and "aside.weight" in parts["model"]
