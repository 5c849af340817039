"""A script turned into one's own project, as README shows: the lines marked "load your" edited."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, Job, epochs, load, same_bytes
from PIL import Image

TORCHRUN2 = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
# Random augmentation, in the loader's worker processes.
NOISE = """class Noise(Dataset):
    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 96

    def __getitem__(self, index):
        noise = torch.randn(3)
        if torch.utils.data.get_worker_info():
            with open(self.name, "a") as file:
                print(f"{noise.tolist()}\\n", end="", file=file)
        return noise + index % 2, index % 2


class Trainer:
"""


def edited(folder: Path, script: str, edits: list[tuple[str, str]]) -> list[str]:
    """The command that runs a copy of `script` in `folder`, with other lines in some places."""
    text = (ROOT / script).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{script} has this {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    (folder / "train.py").write_text(text)
    shutil.copytree(ROOT / "common", folder / "common", dirs_exist_ok=True)
    return [str(folder / "train.py")]


def python(folder: Path, *command: object) -> str:
    return Job([sys.executable, *map(str, command)], folder, {}).finish()


def flowers(folder: Path) -> None:
    """Photographs of three flowers: each is of a colour of its own."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 20), ("test", 7)):
        for channel, name in enumerate(("poppy", "cornflower", "clover")):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 128, (50, 70, 3))
                pixels[..., channel] += 100
                Image.fromarray(pixels.astype("u1")).save(folder / part / name / f"{number}.png")


@pytest.mark.parametrize("script", SCRIPTS)
def test_readmes_example(tmp_path, script):
    readme = (ROOT / "README.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", readme, re.S)
    edits = []
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(li[1:] for li in lines if li[0] in sign) for sign in (" -", " +"))
        edits.append((old, new))
    assert len(edits) >= 3
    if script == "ddp_spawn.py":  # its parent loads the data, and README says what else to edit
        edits = [(old, new) for old, new in edits if "build_model" not in old]
    flowers(tmp_path / "flowers")
    command = edited(tmp_path, script, edits)
    if script not in ("single_gpu.py", "ddp_torchrun.py"):  # the same lines
        return
    launch = TORCHRUN2 if script == "ddp_torchrun.py" else ()
    options = ("--data-dir", "flowers", "--batch-size", 8, "--lr", 0.005, "--no-progress")
    text = python(tmp_path, *launch, *command, 2, *options)
    world_size = 2 if launch else 1
    assert text.count(f"Steps: {-(-60 // (8 * world_size))}\n") == 2 * world_size
    resumed = python(tmp_path, *launch, *command, 4, *options, "--resume")
    assert "Resuming training from snapshot at Epoch 2, sample 0" in resumed
    lines = epochs(text + resumed)
    assert [(line["epoch"], line["total"]) for line in lines] == [(e, 21) for e in range(4)]
    assert max(line["accuracy"] for line in lines) > 90, text + resumed
    assert load(tmp_path / "checkpoint.pt")["model"]["fc.weight"].shape == (3, 512)


def test_workers_draw_differently_on_each_rank_and_in_each_epoch(tmp_path):
    sets = "Noise('train.txt'), Noise('test.txt')"
    edits = [
        ("class Trainer:\n", NOISE),
        ("load_dataset(args.dataset, args.data_dir)  #", f"{sets}  #"),
        ("build_model(args.model, train_set[0][0].shape)", "nn.Linear(3, 2)"),
        ("num_workers=0", "num_workers=2"),
    ]
    command = (*TORCHRUN2, *edited(tmp_path, "ddp_torchrun.py", edits))
    text = python(tmp_path, *command, 2, "--no-progress", "--snapshot-path", "whole.pt")
    assert len(epochs(text)) == 2
    noise = (tmp_path / "train.txt").read_text().splitlines()
    assert len(noise) == len(set(noise)) == 2 * 96
    python(tmp_path, *command, 1, "--no-progress")
    python(tmp_path, *command, 2, "--no-progress", "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
