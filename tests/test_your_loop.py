"""docs/your_loop.md: each of its programs runs, and ends with the weights of the first one."""

import re
from pathlib import Path

import pytest
from helpers import ranks
from helpers.files import load, patched
from helpers.jobs import ROOT

PAGE = (ROOT / "docs" / "your_loop.md").read_text()
(FIRST,) = re.findall(r"```python train.py\n(.*?)```", PAGE, re.S)
*STEPS, TARGETS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
PROGRAMS = [FIRST]
for step in STEPS:
    PROGRAMS.append(patched(PROGRAMS[-1], step))


def train(folder: Path, program: str, processes: int = 1, dtype: str = "float64") -> list[str]:
    """What the program prints; it writes its weights into `folder`."""
    (folder / "train.py").write_text(program)
    return lines(ranks.train(folder, folder / "train.py", processes, dtype=dtype))


def lines(text: str) -> list[str]:
    return re.findall(r"epoch \d: \d+ of 303", text)


def off(folder: Path, expected: dict) -> float:
    """How far the weights of train() are from these."""
    (path,) = folder.glob("*.pt")
    weights = load(path)
    weights = weights.get("model", weights)
    assert weights.keys() == expected.keys()
    return max((weights[name] - expected[name]).abs().max().item() for name in expected)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The lines and the weights of the first program, on one device."""
    folder = tmp_path_factory.mktemp("one")
    return train(folder, FIRST), load(folder / "model.pt")


def test_the_first_program_prints_what_the_page_says(tmp_path):
    pages = PAGE, str(train(tmp_path, FIRST, dtype="float32"))
    shown, ours = (re.findall(r"epoch (\d): (\d+) of 303", page) for page in pages)
    for (epoch, correct), (same, about) in zip(ours, shown, strict=True):
        assert epoch == same and abs(int(correct) - int(about)) <= 3  # machines round otherwise


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_each_step_gives_the_weights_of_one_device(tmp_path, one, step):
    assert train(tmp_path, PROGRAMS[step], 2) == one[0] * (2 if step < 3 else 1)
    assert off(tmp_path, one[1]) < 1e-12


def test_the_last_step_resumes_on_other_numbers_of_processes(tmp_path, one):
    half = PROGRAMS[5].replace("range(first_epoch, 5)", "range(first_epoch, 2)")
    assert half != PROGRAMS[5]
    assert train(tmp_path, half, 2) + train(tmp_path, PROGRAMS[5], 4) == one[0]
    assert off(tmp_path, one[1]) < 1e-12
    assert load(tmp_path / "snapshot.pt")["epoch"] == 5


def test_torchrun_restarts_it_after_a_crash(run, tmp_path, one):
    """And no thread of gloo's is left where the two ranks and torchrun end."""
    crash = """    if epoch == 2 and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ArithmeticError
"""
    program = PROGRAMS[5].replace("    model.train()\n", crash + "    model.train()\n")
    assert program != PROGRAMS[5]
    (tmp_path / "train.py").write_text(program)
    launch = f"torchrun --standalone --nproc_per_node=2 --max-restarts=1 {tmp_path}/train.py"
    env = {"LADDER_DTYPE": "float64", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1, "LADDER_ATEXIT": 1}
    text = run(launch, **env)
    assert lines(text) == one[0]
    assert len(re.findall("^Python ends: (?!.*gloo)", text, re.M)) == 3, text
    assert off(tmp_path, one[1]) < 1e-12


def test_a_loss_over_some_targets(tmp_path):
    """The first change makes the data; without the other one the weights are off."""
    data = "@@\n" + TARGETS.split("@@\n")[1]
    train(tmp_path, patched(FIRST, data))
    expected = load(tmp_path / "model.pt")
    (tmp_path / "model.pt").unlink()
    train(tmp_path, patched(PROGRAMS[3], data), 2)
    assert 0.02 < off(tmp_path, expected) < 0.04  # as the page says
    (tmp_path / "model.pt").unlink()
    train(tmp_path, patched(PROGRAMS[5], TARGETS), 2)
    assert off(tmp_path, expected) < 1e-12


def test_the_finished_program_is_the_last_step():
    assert (ROOT / "docs" / "your_loop.py").read_text() == PROGRAMS[-1]


def test_the_chinese_page_has_the_same_programs():
    chinese = (ROOT / "docs" / "your_loop.zh-CN.md").read_text()
    fence = re.compile(r"^```.*?^```$", re.M | re.S)
    assert fence.findall(chinese) == fence.findall(PAGE)
    spans = [sorted(re.findall(r"`[^`]+`", fence.sub("", page))) for page in (PAGE, chinese)]
    assert spans[0] == spans[1]
    headings = [re.findall(r"^## (\d?)", page, re.M) for page in (PAGE, chinese)]
    assert headings[0] == headings[1] == ["1", "2", "3", "4", "5", "", ""]
