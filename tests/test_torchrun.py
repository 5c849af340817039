"""torchrun starts ddp_torchrun.py in every usual way, restarts it, and reports what has failed."""

import re
import shutil
import time

import pytest
from helpers.files import difference, load, same_bytes
from helpers.hosts import require
from helpers.jobs import TORCHRUN, epochs, losses

RESTARTS = "torchrun --standalone --nproc_per_node=2 --max-restarts={} ddp_torchrun.py"
# Without it, most restarts on torchrun's own rendezvous store fail; README says so.
SHARED_STORE_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}


@pytest.mark.slow("five launches of real command lines")
def test_ways_of_launching(run, tmp_path, fashion):
    options = (1, *fashion(200, 10))
    launches = [
        "torchrun --nproc_per_node=2 ddp_torchrun.py",
        TORCHRUN.format(2),
        "python -m torch.distributed.run --standalone --nproc-per-node 2 ddp_torchrun.py",
        "python -m torch.distributed.launch --standalone --nproc_per_node=2 ddp_torchrun.py",
    ]
    env = {"LADDER_DTYPE": "float64"}
    snapshots = []
    for launch in launches:
        text = run(launch, *options, **env)
        assert "[rank 0 of 2] " in text and "[rank 1 of 2] " in text and len(epochs(text)) == 1
        assert text.count("Steps: 4\n") == 2 and text.count("Total time: ") == 1
        snapshots.append(load(tmp_path / "checkpoint.pt"))
    assert all(same_bytes(snapshot, snapshots[0]) for snapshot in snapshots)
    text = run("ddp_torchrun.py", *options, "--batch-size", 64, **env)  # for a debugger
    assert "[rank 0 of 1] " in text and text.count("Steps: 4\n") == 1
    assert difference(load(tmp_path / "checkpoint.pt"), snapshots[0]) < 1e-12


def test_a_restart_goes_on_from_the_last_snapshot_and_a_report_names_the_rank(
    run, fork, tmp_path, fashion
):
    """Rank 1 raises in its seventh forward pass, in training or evaluation; an epoch has five."""
    options = fashion(200, 10)
    fork(TORCHRUN.format(2), 2, *options, "--snapshot-path", "whole.pt")
    env = {**SHARED_STORE_OFF, "LADDER_RAISE": "1:7"}
    text = run(RESTARTS.format(1), 3, *options, "--resume", status=1, **env)
    assert text.count("No snapshot at ") == 1
    assert text.count("Resuming training from snapshot at Epoch 1\n") == 1
    assert [line["epoch"] for line in epochs(text)] == [0, 1]
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    report = text.split("Root Cause (first observed failure):")[1]
    assert "rank      : 1 (local_rank: 1)" in report
    assert "ArithmeticError: the test's own error" in report
    assert re.search(r'ddp_torchrun.py", line \d+, in _run_batch', report)


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"])
def test_a_mistake_is_said_by_one_process_and_once(command_line, monkeypatch, capsys, variable):
    """The others wait until torchrun ends them. What the first one says: test_errors.py."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SystemExit, match="2"):
        command_line("ddp_torchrun.py", "--lr", -1).parse_args()
    assert waited == [5] and not capsys.readouterr().err


@pytest.mark.slow("compiles twice")
def test_compile_gives_the_same_losses_and_clean_snapshots(run, tmp_path, fashion):
    """In double precision. A laptop without a C++ compiler skips this; CI has one."""
    require(None if shutil.which("g++") else "no C++ compiler")
    options = (2, *fashion(150, 10), "--log-interval", 1)
    env = {"LADDER_DTYPE": "float64"}
    expected = losses(run(TORCHRUN.format(2), *options, "--snapshot-path", "eager.pt", **env))
    text = run(TORCHRUN.format(2), *options, "--compile", TORCH_LOGS="graph_code", **env)
    assert len(losses(text)) == 6 and losses(text) == pytest.approx(expected, abs=1e-6)
    assert "TRACED GRAPH" in text  # something was compiled
    compiled, eager = load(tmp_path / "checkpoint.pt"), load(tmp_path / "eager.pt")
    assert list(compiled["model"]) == list(eager["model"])
    assert difference(compiled, eager) < 1e-10
