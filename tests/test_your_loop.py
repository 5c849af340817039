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
LINE = r"epoch (\d): (\d+) of 303"


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


def half(program: str) -> str:
    return patched(program, "@@\n-in range(first_epoch, 5):\n+in range(first_epoch, 2):\n")


def test_the_last_step_resumes_on_other_numbers_of_processes(tmp_path, one):
    last = (ROOT / "docs" / "your_loop.py").read_text()
    assert [last] == PROGRAMS[5:]
    assert train(tmp_path, half(last), 2) + train(tmp_path, last, 4) == one[0]
    same(load(tmp_path / "snapshot.pt")["model"], one[1])


TWO_NODES = """@@
     rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
+    os.makedirs(f"{rank}", exist_ok=True)
+    os.chdir(f"{rank}")
@@
         if rank == 0:
+            pass
+        torch.save(model.module.state_dict(), "model.pt")
+        if rank == 0:
"""


@pytest.mark.parametrize("stale", [True, False])
def test_a_node_whose_snapshot_is_another_or_missing_resumes_from_that_of_rank_0(
    tmp_path, one, stale
):
    """Each rank has a folder of its own. The stale snapshot is of the same epoch."""
    program = patched(PROGRAMS[5], TWO_NODES)
    train(tmp_path, half(program), 2)
    if stale:
        snapshot = load(tmp_path / "0" / "snapshot.pt")
        for state in snapshot["optimizer"]["state"].values():
            state["momentum_buffer"].mul_(2)
        torch.save(snapshot, tmp_path / "1" / "snapshot.pt")
    assert train(tmp_path, program, 2) == one[0][2:]
    for rank in "01":
        same(load(tmp_path / rank / "model.pt"), one[1])


def test_torchrun_restarts_it_after_a_crash(run, tmp_path, one):
    crash = """@@
+        if epoch == 2 and rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
+            raise ArithmeticError
         model.train()
"""
    (tmp_path / "train.py").write_text(patched(PROGRAMS[5], crash))
    launch = f"torchrun --standalone --nproc_per_node=2 --max-restarts=1 {tmp_path}/train.py"
    env = {"LADDER_DTYPE": "float64", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1, "LADDER_ATEXIT": 1}
    text = run(launch, **env)
    assert len(re.findall("^Python ends: (?!.*gloo)", text, re.M)) == 3, text
    assert re.findall(LINE, text) == one[0]
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
    """The first change makes the data; without the other one the weights are off."""
    data = "@@\n" + TARGETS.split("@@\n")[1]
    train(tmp_path, patched(FIRST, data))
    expected = load(tmp_path / "model.pt")
    train(tmp_path, patched(PROGRAMS[3], data), 2)
    weights = load(tmp_path / "model.pt")
    off = max((weights[name] - expected[name]).abs().max() for name in expected)
    assert 0.02 < off < 0.04  # as the page says
    train(tmp_path, patched(PROGRAMS[5], TARGETS), 2)
    same(load(tmp_path / "snapshot.pt")["model"], expected)


def test_the_table_says_where_ddp_torchrun_has_it():
    script = (ROOT / "ddp_torchrun.py").read_text()
    functions = {re.search(r"^def (\w+)", part, re.M): part for part in script.split("\n\n\n")}
    functions = {found[1]: part for found, part in functions.items() if found}
    rows = re.findall(r"^\| (.+) \| (.*) ?\| `(\w+)` \| `(.+)` \|$", PAGE, re.M)
    assert len(rows) > 15
    for adds, options, function, line in rows:
        assert line in functions[function], adds
        assert all(f'add("{option}"' in script for option in re.findall("`(.*?)`", options)), adds
