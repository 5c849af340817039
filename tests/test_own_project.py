"""A script turned into one's own project: the lines marked "your" edited, and no other."""

import re
import shutil
from pathlib import Path

import pytest
from helpers.files import difference, load, patched, same_bytes
from helpers.jobs import ROOT, SCRIPTS, epochs
from helpers.ranks import train

# As tutorials write them: a sample at a time, without __getitems__. Samples are dictionaries, of
# which one's own collate_fn makes batches.
OWN = """class Pairs(torch.utils.data.Dataset):
    def __init__(self, length):
        self.sources = torch.randn(length, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.sources)

    def __getitem__(self, index):
        source = self.sources[index]
        return {"one": source, "other": source + 1, "label": int(source.sum() > 0)}


def collate_pairs(samples):
    batch = torch.utils.data.default_collate(samples)
    return batch, batch.pop("label")


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.aside = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, one, other):
        hidden = self.body(one * other).relu()
        outputs = {"logits": self.head(hidden)}
        if self.training:  # an auxiliary head
            outputs["aside"] = self.aside(hidden)
        return outputs


def losses(outputs, *given, **named):
    return sum(F.cross_entropy(values, *given, **named) for values in outputs.values())


def train_epoch("""
MARKS = {
    "loss = F.cross_entropy(model(inputs),": "loss = losses(model(**inputs),",
    "inputs = inputs.to(device, non_blocking=loader.pin_memory)": (
        "inputs = {name: values.to(device) for name, values in inputs.items()}"
    ),
    "F.cross_entropy(outputs,": "F.cross_entropy(outputs['logits'],",
    "(outputs.argmax": "(outputs['logits'].argmax",
    "outputs = model(inputs)": "outputs = model(**inputs)",
    "load_dataset(args.dataset, args.data_dir)": "Pairs(68), Pairs(21)",
    "build_model(args.model, train_set[0][0].shape)": "Own()",
    "torch.optim.SGD(model.parameters(), args.lr, args.momentum)": (
        "torch.optim.AdamW(model.parameters(), args.lr)"
    ),
    "**options)": "**options | {'collate_fn': collate_pairs})",
}


def edited(folder: Path, script: str, marks: dict[str, str]) -> str:
    """The path of a copy of `script` with other lines at its marks, each of them there."""
    text = (ROOT / script).read_text().replace("def train_epoch(", OWN)
    if "from torch import nn\n" not in text:
        text = text.replace("from torch.utils", "from torch import nn\nfrom torch.utils", 1)
    lines = text.splitlines(keepends=True)
    for old, new in marks.items():
        marked = [number for number, line in enumerate(lines) if old in line]
        assert marked, f"{script} has no {old}"
        for number in marked:
            line = lines[number]
            assert "# your " in line, f"{script} has this unmarked: {line}"
            lines[number] = line.replace(old, new)
    (folder / script).write_text("".join(lines))
    shutil.copytree(ROOT / "common", folder / "common", dirs_exist_ok=True)
    return str(folder / script)


def test_every_script_trains_ones_own_project_to_the_same_weights(tmp_path):
    """Dictionaries of inputs and outputs, a head for training only, and another optimizer.

    Of 68 samples the last batch is short. With --accumulate it has a short micro-batch, too.
    """
    made = {}
    for script, processes, options in (
        ("single_gpu.py", 1, (12,)),
        ("data_parallel.py", 1, (12,)),
        ("ddp_spawn.py", 2, (6,)),
        ("ddp_torchrun.py", 2, (3, "--accumulate", 2)),
        ("multinode.py", 4, (3,)),
    ):
        path = edited(tmp_path, script, MARKS)
        options = (2, "--lr", 0.01, "--batch-size", *options)
        text = train(tmp_path, path, processes, *options, dtype="float64")
        lines = [{**line, "rate": 0} for line in epochs(text)]
        made[script] = load(tmp_path / "checkpoint.pt"), lines
    assert {*made} == {*SCRIPTS}
    first, lines = made["single_gpu.py"]
    assert lines[1]["train_loss"] < lines[0]["train_loss"] and lines[1]["total"] == 21
    assert "aside.weight" in first["model"]
    for script, (snapshot, its_lines) in made.items():
        assert its_lines == lines, script
        assert difference(snapshot, first) < 1e-12, script


def test_a_copy_needs_no_common(tmp_path):
    """The functions that your_project.md has for it stand in place of the imports."""
    page = (ROOT / "docs" / "your_project.md").read_text()
    instead = re.search(r"```python\n(.*?)```", page, re.S)[1]
    path = Path(edited(tmp_path, "ddp_torchrun.py", MARKS))
    imports = re.compile(r"(?:from common\..*\n)+")
    text, count = imports.subn(f"\n\n{instead}", path.read_text())
    for option in ("dataset", "model"):
        text = re.sub(rf'\n    add\("--{option}".*', "", text)
        text = text.replace(f'"{option}", ', "")
    text = re.sub(r"\n    args.model = .*", "", text)
    assert count == 1 and "from common" not in text and "DATASETS" not in text
    path.write_text(text)
    options = ("--batch-size", 6, "--lr", 0.01)
    whole = epochs(train(tmp_path, path, 2, 2, *options, "--snapshot-path", "whole.pt"))
    assert whole[1]["train_loss"] < whole[0]["train_loss"]
    train(tmp_path, path, 2, 1, *options)
    train(tmp_path, path, 2, 2, *options, "--resume")
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


LOGS = """@@ at module level, before what the guard has made ready, and after what the rank has
 import argparse
+import logging
+
+print("module level")
@@
 def main(rank, args):
+    logging.info("unheard")
+    logging.basicConfig(level=logging.INFO, force=True)
+    logging.info("heard")
@@
     args = parse_args()
+    logging.basicConfig(level=logging.INFO)
"""


@pytest.mark.slow("mp.spawn")
def test_what_stands_under_the_main_guard_is_not_there_in_the_ranks(run, tmp_path):
    """And what stands at module level runs in each of them, too."""
    (tmp_path / "train.py").write_text(patched((ROOT / "ddp_spawn.py").read_text(), LOGS))
    shutil.copytree(ROOT / "common", tmp_path / "common")
    text = run(str(tmp_path / "train.py"), 1, "--nproc-per-node", 2, "--log-interval", 0)
    assert [text.count(what) for what in ("module level", ":unheard", ":heard")] == [3, 0, 2], text
