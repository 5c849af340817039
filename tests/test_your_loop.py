"""docs/your_loop.md: each of its programs runs, and ends with the weights of one device."""

import re
import tempfile
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import ranks
from helpers.files import load, patched
from helpers.jobs import ROOT
from torch import nn
from torch.multiprocessing import ProcessRaisedException

PAGE = (ROOT / "docs" / "your_loop.md").read_text()
(FIRST,) = re.findall(r"```python train.py\n(.*?)```", PAGE, re.S)
*STEPS, TARGETS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
PROGRAMS = [*accumulate(STEPS, patched, initial=FIRST)]
same = partial(torch.testing.assert_close, rtol=0, atol=1e-12)  # two state_dicts
LINE = r"epoch (\d): (\d+) of 303"
AMP = "torch.autocast(device.type, torch.bfloat16"


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
    assert last == PROGRAMS[5]
    half = last.replace("range(first_epoch, 5)", "range(first_epoch, 2)")
    assert half != last
    assert train(tmp_path, half, 2) + train(tmp_path, last, 4) == one[0]
    same(load(tmp_path / "snapshot.pt")["model"], one[1])


COUNTED = """@@
     model = DDP(model)  # needs no device_ids, because the loop moves the inputs itself
+    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
+    sent = []
+    hook = lambda sent, bucket: sent.append(1) or allreduce_hook(None, bucket)
+    model.register_comm_hook(sent, hook)
@@
             torch.save({**snapshot, "epoch": epoch + 1}, "snapshot.pt.tmp")
+            assert len(sent) == 16 * (epoch + 1)  # once in each step
"""


def test_accumulated_steps_are_those_of_one_device(tmp_path, one):
    """Of 1,000 samples the last step has 40, or 20 a rank, in micro-batches of 16 and 4."""
    program = PROGRAMS[7].replace(AMP, f"{AMP}, enabled=False")
    program = patched(program, COUNTED)
    assert train(tmp_path, program, 2) == one[0]
    same(load(tmp_path / "snapshot.pt")["model"], one[1])


@pytest.mark.parametrize("step", [8, 10])
def test_a_real_run_is_that_of_one_process_and_is_resumed(tmp_path, step):
    """With a schedule and clipped gradients, in float64. It stops within the warm-up."""
    assert (ROOT / "docs" / "real_run.py").read_text() == PROGRAMS[10] == PROGRAMS[-1]
    whole = PROGRAMS[step].replace(AMP, f"{AMP}, enabled=False")
    whole = re.sub("ACCUMULATE = .", "ACCUMULATE = 1", whole).replace(
        "WARM_UP = 20", "WARM_UP = 40"
    )
    lines, expected = train(tmp_path, whole), load(tmp_path / "real_run.pt")
    (tmp_path / "real_run.pt").unlink()
    whole = whole.replace("ACCUMULATE = 1", "ACCUMULATE = 2")
    half = whole.replace("range(first_epoch, EPOCHS)", "range(first_epoch, 2)")
    assert train(tmp_path, half, 2) + train(tmp_path, whole, 4) == lines
    snapshot = load(tmp_path / "real_run.pt")
    same(snapshot["model"], expected["model"])
    assert snapshot["schedule"] == expected["schedule"]
    assert snapshot["schedule"]["last_epoch"] == 5 * 16


@pytest.mark.numbers
def test_what_a_real_run_prints(tmp_path):
    """Losses and the gradient's norm are those of the whole job, at any number of ranks.
    In bfloat16 they are not those of float32, but close."""
    texts = []
    for amp, processes, micro in (("False", 1, 1), ("False", 2, 2), ("True", 2, 2)):
        program = PROGRAMS[10].replace(AMP, f"{AMP}, enabled={amp}")
        (tmp_path / "train.py").write_text(program.replace("LATE = 1", f"LATE = {micro}"))
        texts.append(ranks.train(tmp_path, tmp_path / "train.py", processes))
        (tmp_path / "real_run.pt").unlink()
    found = r"step 10: loss (\S+) \| lr (\S+) \| gradient norm (\S+) \| \d+ samples/s \| 0 MiB\n"
    found += r"epoch \d, step 16: loss (\S+) .*\nepoch \d: \d+ of 303, test loss (\S+)\n"
    one, two, half = ([[*map(float, line)] for line in re.findall(found, text)] for text in texts)
    assert len(one) == 5 and [line[1] for line in one] == [0.0478, 0.0983, 0.0727, 0.0321, 0.0033]
    for line, same_line, other in zip(one, two, half, strict=True):
        assert same_line == pytest.approx(line, abs=2e-3)
        assert other == pytest.approx(line, rel=0.2, abs=0.02)
    assert half != two


def test_a_real_run_stops_before_it_does_something_else(tmp_path, monkeypatch):
    """Or before it loses a good snapshot."""
    train(tmp_path, PROGRAMS[10], 2)
    saved = (tmp_path / "real_run.pt").read_bytes()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # mp.start_processes leaves files there
    for old, new, processes, said in (
        (
            "LR = 0.1",
            "LR = 0.2",
            2,
            "delete real_run.pt, or set {'SEED': 42, 'EPOCHS': 5, 'LR': 0.1, 'WARM_UP': 20, ",
        ),
        ("EPOCHS = 5\nGLOBAL_BATCH = 64", "EPOCHS = 10\nGLOBAL_BATCH = 128", 2, "'steps': 80}"),
        (
            "    batch_size, rest",
            "    dist.barrier()  # all are connected\n    batch_size, rest",
            3,
            "set GLOBAL_BATCH=64 to a multiple of 3 ranks * ACCUMULATE=1",
        ),
        (
            "if os.path.exists(SNAPSHOT)",
            "if rank == 0",
            2,
            "real_run.pt is not the same on all ranks: [5, 0] epochs",
        ),
        (
            "range(first_epoch, EPOCHS)",
            "(model.module[0].bias.data.fill_(math.nan), 5)[1:]",
            2,
            "epoch 5: the test loss is nan, nothing is saved",
        ),
    ):
        with pytest.raises(ProcessRaisedException, match="AssertionError") as error:
            train(tmp_path, PROGRAMS[10].replace(old, new), processes)
        assert said in str(error.value)
    assert (tmp_path / "real_run.pt").read_bytes() == saved


def test_a_real_run_evaluates_the_model_that_it_saves(tmp_path):
    """With BatchNorm, whose statistics differ between the ranks until rank 0's are sent."""
    program = PROGRAMS[10].replace(AMP, f"{AMP}, enabled=False")
    (tmp_path / "train.py").write_text(program.replace("nn.ReLU()", "nn.BatchNorm1d(64)"))
    text = ranks.train(tmp_path, tmp_path / "train.py", 2, dtype="float64")
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)).double()
    model.load_state_dict(load(tmp_path / "real_run.pt")["model"])
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(303, 20, generator=generator, dtype=torch.float64)
    loss = F.cross_entropy(model.eval()(inputs), (inputs.sum(dim=1) > 0).long())
    assert re.findall(r"test loss (\S+)", text)[-1] == f"{loss:.4f}"


def test_a_real_run_with_dropout_is_resumed(tmp_path):
    """Each rank has masks of its own, and the same ones after a resume."""
    program = PROGRAMS[10].replace(AMP, f"{AMP}, enabled=False").replace("ReLU()", "Dropout(0.5)")
    half = program.replace("range(first_epoch, EPOCHS)", "range(first_epoch, 2)")
    alike = program.replace(" + rank)", ")")
    weights = []
    for runs in ([program], [half, program], [alike]):
        for run in runs:
            train(tmp_path, run, 2)
        weights.append(load(tmp_path / "real_run.pt")["model"])
        (tmp_path / "real_run.pt").unlink()
    same(weights[1], weights[0])
    with pytest.raises(AssertionError):
        same(weights[2], weights[0])


def test_a_warm_up_may_last_for_the_whole_run(tmp_path):
    assert len(train(tmp_path, PROGRAMS[10].replace("WARM_UP = 20", "WARM_UP = 80"))) == 5


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
        mean + '+            loss = F.cross_entropy(model(inputs), targets, reduction="sum") / 64'
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


NONE_LEFT = """@@
+            if (epoch, step) == (1, 3):
+                targets = torch.full_like(targets, -100)
             with contextlib.nullcontext() if last else model.no_sync():
"""


def test_a_loss_over_some_targets_of_accumulated_steps(tmp_path):
    """The template with its recipe: weights and printed losses are those of one process. One step
    has no targets."""
    recipe = (ROOT / "docs" / "recipes" / "padded.diff").read_text()
    data = "@@\n" + TARGETS.split("@@\n")[1]
    program = patched(PROGRAMS[10].replace(AMP, f"{AMP}, enabled=False"), recipe + data + NONE_LEFT)
    found = []
    for processes, micro in ((1, 1), (2, 2)):
        (tmp_path / "train.py").write_text(program.replace("LATE = 1", f"LATE = {micro}"))
        text = ranks.train(tmp_path, tmp_path / "train.py", processes, dtype="float64")
        lines = re.findall(r"loss (\S+) \| lr .* norm (\S+)|: (\d+ of 259, .*)", text)
        found.append((lines, load(tmp_path / "real_run.pt")["model"]))
        (tmp_path / "real_run.pt").unlink()
    (one, expected), (two, weights) = found
    assert len(one) == 15 and one == two
    same(weights, expected)


IN_WORKERS = """@@
-    return TensorDataset(inputs, targets)
+    return InWorkers(inputs, targets)
+
+
+class InWorkers(TensorDataset):
+    def __getitems__(self, indices):
+        assert torch.utils.data.get_worker_info()
+        return [self[index] for index in indices]
@@
-WORKERS = 0  # spawned processes per loader and rank: try 4 for files
+WORKERS = 1
"""


@pytest.mark.slow("spawned workers of two ranks")
def test_a_real_run_with_loader_workers(run, tmp_path):
    expected = train(tmp_path, PROGRAMS[10], 2), load(tmp_path / "real_run.pt")
    (tmp_path / "real_run.pt").unlink()
    (tmp_path / "train.py").write_text(patched(PROGRAMS[10], IN_WORKERS))
    launch = f"torchrun --standalone --nproc_per_node=2 {tmp_path}/train.py"
    assert re.findall(LINE, run(launch, LADDER_DTYPE="float64")) == expected[0]
    same(load(tmp_path / "real_run.pt")["model"], expected[1]["model"])
