"""A script turned into one's own project: the lines marked "your" edited, and no other."""

import re
import shutil
from pathlib import Path

from helpers.files import difference, load
from helpers.jobs import ROOT, SCRIPTS, epochs
from helpers.ranks import train

# In place of the two imports. The data set is as tutorials write them: one sample at a time.
OWN = """
class Points(torch.utils.data.Dataset):
    def __init__(self, length):
        self.points = torch.randn(length, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], int(self.points[index].sum() > 0)


def own_model():
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
"""
MARKS = {
    "load_dataset(args.dataset, args.data_dir)": "Points(68), Points(21)",
    "build_model(args.model, args.dataset)": "own_model()",
    "F.cross_entropy(model(inputs), targets)": "F.multi_margin_loss(model(inputs), targets)",
    "F.cross_entropy(outputs, targets)": "F.multi_margin_loss(outputs, targets)",
}


def edited(script: str) -> str:
    """The text of a script with other lines at its marks, and without two options."""
    lines = (ROOT / script).read_text().splitlines(keepends=True)
    for old, new in MARKS.items():
        (number,) = (number for number, line in enumerate(lines) if old in line)
        assert "# your " in lines[number], f"{script} has this unmarked: {lines[number]}"
        lines[number] = lines[number].replace(old, new)
    text = re.sub(r' +add\("--(dataset|model)".*\n', "", "".join(lines))
    text, count = re.subn(r"(from common\.(data|model) .*# replace by your own\n)+", "", text)
    assert count == 1 and "DATASETS" not in text
    return text.replace("import set_seed\n", f"import set_seed\n\n{OWN}")


def test_every_script_trains_ones_own_project_to_the_same_weights(tmp_path):
    """With common/seed.py alone. Of 68 samples the last batch is short."""
    (tmp_path / "common").mkdir()
    shutil.copy(ROOT / "common" / "seed.py", tmp_path / "common")
    made = []
    for script, processes in zip(SCRIPTS, (1, 1, 2, 2, 4), strict=True):
        (tmp_path / script).write_text(edited(script))
        options = (2, "--snapshot-path", f"{script}.pt", "--batch-size", 12 // processes)
        text = train(tmp_path, tmp_path / script, processes, *options, dtype="float64")
        lines = [{**line, "rate": 0} for line in epochs(text)]
        made.append((load(Path(tmp_path, f"{script}.pt")), lines))
    first, lines = made[0]
    assert lines[1]["train_loss"] < lines[0]["train_loss"] and lines[1]["total"] == 21
    for snapshot, its_lines in made:
        assert its_lines == lines and difference(snapshot, first) < 1e-12
