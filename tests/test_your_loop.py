"""docs/your_loop.md: each of its programs runs, and ends with the weights of one device."""

import re
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from helpers import ranks
from helpers.files import load, patched
from helpers.jobs import ROOT

PAGE = (ROOT / "docs" / "your_loop.md").read_text()
FIRST, COMPARE = (
    re.search(rf"```python {name}.py\n(.*?)```", PAGE, re.S)[1] for name in ("train", "compare")
)
*STEPS, TARGETS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
PROGRAMS = [*accumulate(STEPS, patched, initial=FIRST)]
same = partial(torch.testing.assert_close, rtol=0, atol=1e-12)  # two state_dicts
LINE = r"epoch (\d): (\d+) of 303 correct"


def train(folder: Path, program: str, processes: int = 1, dtype: str = "float64") -> list[tuple]:
    """The epochs and numbers that the program prints; it writes its weights into `folder`."""
    (folder / "train.py").write_text(program)
    return re.findall(LINE, ranks.train(folder, folder / "train.py", processes, dtype=dtype))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The lines and the weights of the first program, on one device."""
    folder = tmp_path_factory.mktemp("one")
    return train(folder, FIRST), load(folder / "model.pt")


@pytest.mark.numbers
def test_the_first_program_prints_what_the_page_says(tmp_path):
    printed = train(tmp_path, FIRST, dtype="float32")
    shown = re.findall(f"`{LINE}`", PAGE)
    assert len(printed) == 5 and len(shown) == 2
    for ours, said in zip((printed[0], printed[-1]), shown, strict=True):
        assert ours[0] == said[0] and abs(int(ours[1]) - int(said[1])) <= 3  # rounding differs


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_each_step_gives_the_weights_of_one_device(tmp_path, one, step):
    assert train(tmp_path, PROGRAMS[step], 2) == one[0] * (2 if step < 3 else 1)
    same(load(tmp_path / "model.pt"), one[1])


def test_the_last_step_resumes_on_other_numbers_of_processes(tmp_path, one):
    last = (ROOT / "docs" / "your_loop.py").read_text()
    assert [last] == PROGRAMS[5:]
    half = patched(last, "@@\n-in range(first_epoch, 5):\n+in range(first_epoch, 2):\n")
    assert train(tmp_path, half, 2) + train(tmp_path, last, 4) == one[0]
    same(load(tmp_path / "snapshot.pt")["model"], one[1])


def test_a_loss_over_some_targets(tmp_path):
    """The first change makes the data; the other one is the page's."""
    train(tmp_path, patched(FIRST, "@@\n" + TARGETS.split("@@\n")[1]))
    expected = load(tmp_path / "model.pt")
    train(tmp_path, patched(PROGRAMS[5], TARGETS), 2)
    same(load(tmp_path / "snapshot.pt")["model"], expected)


BATCHNORM = {"nn.ReLU()": "nn.BatchNorm1d(64), nn.ReLU()"}
EVAL = {"model.train()": "model.train(); model.module[1].eval()"}


@pytest.mark.parametrize(
    ("changes", "rounding"), [({}, True), (BATCHNORM, False), (BATCHNORM | EVAL, True)]
)
def test_what_compare_prints(tmp_path, monkeypatch, capsys, changes, rounding):
    """Of one process and two, with BatchNorm, and with BatchNorm in eval mode."""
    program = PROGRAMS[5]
    for old, new in changes.items():
        assert program.count(old) == 1
        program = program.replace(old, new)
    for processes in (1, 2):
        train(tmp_path, program, processes)
        (tmp_path / "snapshot.pt").rename(tmp_path / f"{processes}.pt")
    monkeypatch.setattr("sys.argv", ["compare.py", tmp_path / "1.pt", tmp_path / "2.pt"])
    exec(COMPARE, {})
    assert (float(capsys.readouterr().out) < 1e-10) is rounding
