"""docs/your_loop.md: each of its programs runs, and the last gives the first one's weights."""

import re
import sys

import pytest
from helpers.files import load, patched
from helpers.jobs import ROOT, Job

DOUBLE = {"LADDER_DTYPE": "float64"}
PAGE = (ROOT / "docs" / "your_loop.md").read_text()
(FIRST,) = re.findall(r"```python train.py\n(.*?)```", PAGE, re.S)
PROGRAMS = [FIRST]
for step in re.findall(r"^## \d\. .*?```diff\n(.*?)```", PAGE, re.M | re.S):
    PROGRAMS.append(patched(PROGRAMS[-1], step))
LINE = re.compile(r"^epoch (\d): (\d+) of (\d+)$", re.M)


@pytest.fixture
def train(tmp_path):
    """train(number of the step, processes) -> what the program prints, and its weights."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]

    def train(step: int, processes: int = 0, fork: bool = True, **env: str) -> tuple[list, dict]:
        (tmp_path / "train.py").write_text(PROGRAMS[step])
        launch = [*torchrun, str(processes)] if processes else [sys.executable]
        job = Job([*launch, str(tmp_path / "train.py")], tmp_path, env, fork=fork)
        return LINE.findall(job.finish()), load(tmp_path / "model.pt")

    return train


def test_it_prints_what_the_page_says(train):
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.S)
    lines, _ = train(0)
    for ours, theirs in zip(LINE.findall(shown), lines, strict=True):
        assert (ours[0], ours[2]) == (theirs[0], theirs[2])
        assert abs(int(ours[1]) - int(theirs[1])) < 3  # another machine rounds otherwise


@pytest.mark.parametrize(
    "step", [*(pytest.param(n, marks=pytest.mark.slow("also forked")) for n in range(8)), 8]
)
def test_by_the_real_command_line(train, step):
    _, expected = train(0, **DOUBLE)
    _, weights = train(step, 2 if step else 0, fork=False, **DOUBLE)
    off = max((weights[name] - expected[name]).abs().max() for name in expected)
    assert off < (0.1 if step == 4 else 1e-12)


@pytest.mark.parametrize("processes", [2, 4])
def test_each_step_runs_and_the_last_gives_the_weights_of_the_first(train, processes):
    assert len(PROGRAMS) == 9
    expected_lines, expected = train(0, **DOUBLE)
    assert len(expected_lines) == 5
    for step in range(1, 9):
        lines, weights = train(step, processes, **DOUBLE)
        off = max((weights[name] - expected[name]).abs().max() for name in expected)
        if step > 6:  # before that, all ranks print
            assert lines == expected_lines
        # With each rank's own mean the weights are off: that is what step 5 is for.
        assert (0.001 < off < 0.1) if step == 4 else off < 1e-12, step


def test_the_whole_program_is_the_last_step():
    (whole,) = re.findall(r"<details>.*?```python\n(.*?)```", PAGE, re.S)
    assert whole == PROGRAMS[-1]


def test_the_chinese_page_has_the_same_programs():
    chinese = (ROOT / "docs" / "your_loop.zh-CN.md").read_text()
    fence = re.compile(r"^```.*?^```$", re.M | re.S)
    assert fence.findall(chinese) == fence.findall(PAGE)
    spans = [sorted(re.findall(r"`[^`]+`", fence.sub("", page))) for page in (PAGE, chinese)]
    assert spans[0] == spans[1]
    assert [page.count("\n## ") for page in (PAGE, chinese)] == [9, 9]
    for page in (PAGE, chinese):
        for link in re.findall(r"\]\(([^)]+)\)", page):
            assert (ROOT / "docs" / link.partition("#")[0]).exists(), link
