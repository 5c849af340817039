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
(FIRST,) = re.findall(r"```python train.py\n(.*?)```", PAGE, re.S)
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
    for ours, shown in zip(printed, re.findall(f"{LINE}\n", PAGE), strict=True):
        assert ours[0] == shown[0] and abs(int(ours[1]) - int(shown[1])) <= 3  # rounding differs


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


def test_a_loss_that_is_a_sum_is_multiplied_by_the_world_size(tmp_path):
    """Here a small part of the sum, because the learning rate stays as it is."""
    mean = "@@\n-            loss = F.cross_entropy(model(inputs), targets)\n"
    some = (
        f'{mean}+            loss = F.cross_entropy(model(inputs), targets, reduction="sum") / 64'
    )
    train(tmp_path, patched(FIRST, f"{some}\n"))
    expected = load(tmp_path / "model.pt")
    train(tmp_path, patched(PROGRAMS[3], f"{some} * world_size\n"), 2)
    same(load(tmp_path / "model.pt"), expected)


def test_a_loss_over_some_targets(tmp_path):
    """The first change makes the data; the other one is the page's."""
    train(tmp_path, patched(FIRST, "@@\n" + TARGETS.split("@@\n")[1]))
    expected = load(tmp_path / "model.pt")
    train(tmp_path, patched(PROGRAMS[5], TARGETS), 2)
    same(load(tmp_path / "snapshot.pt")["model"], expected)
