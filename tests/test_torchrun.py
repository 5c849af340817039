"""torchrun starts ddp_torchrun.py in every usual way, restarts it, and reports what has failed."""

import re
import shutil

import pytest
from helpers.files import difference, load, same_bytes
from helpers.hosts import require
from helpers.jobs import TORCHRUN, epochs, losses
from helpers.ranks import train

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}  # for each attempt (pytorch#135712)


def test_restarts_that_may_hang_are_refused(run, tmp_path):
    """torchrun says only to its workers which store it uses."""
    launch = "torchrun --nproc_per_node=1 --max-restarts=1 ddp_torchrun.py"
    text = run(launch, "--resume", status=1)
    assert text.count("error: a restart may hang: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 2
    assert not (tmp_path / "checkpoint.pt").exists()


def test_what_one_rank_refuses_all_refuse(run, tmp_path, fashion):
    """So none is left to wait in a collective, and the line is the last one but torchrun's."""
    options = (1, *fashion(100, 10))
    train(tmp_path, "ddp_torchrun.py", 2, *options)
    text = run(TORCHRUN.format(2), *options, "--resume", "--momentum", 0.5, status=1)
    line = "error: checkpoint.pt was made with momentum 0.9, not 0.5\n"
    before, *_, after = text.split(line)
    assert text.count(line) == 2 and "Traceback" not in before and "Epoch " not in text
    torchruns = r"[WE]\d+ |Traceback|torch|Fail|Root|\[|=|-|/|\s|$"
    assert all(re.match(torchruns, line) for line in after.splitlines()), after


def test_a_restart_goes_on_from_the_last_snapshot_and_a_report_names_the_rank(
    run, tmp_path, fashion
):
    """Rank 1 raises in its seventh forward pass, in training or evaluation; an epoch has five."""
    options = fashion(200, 10)
    train(tmp_path, "ddp_torchrun.py", 2, 2, *options, "--snapshot-path", "whole.pt")
    options = (3, *options, "--resume")
    launch, env = TORCHRUN.format("2 --max-restarts=1"), {"LADDER_RAISE": "1:7", **OWN_STORE}
    text = run(launch, *options, status=1, **env)
    assert text.count("No snapshot at ") == 1
    assert text.count("Resuming training from snapshot at Epoch 1\n") == 1
    assert [line["epoch"] for line in epochs(text)] == [0, 1]
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    assert "Root Cause (first" in text, text
    report = text.split("Root Cause (first observed failure):")[1]
    assert "rank      : 1 (local_rank: 1)" in report
    assert "ArithmeticError: the test's own error" in report
    assert re.search(r'ddp_torchrun.py", line \d+, in train_epoch', report)


@pytest.mark.slow("compiles twice")
def test_compile_gives_the_same_losses_and_clean_snapshots(run, tmp_path, fashion):
    """In double precision. A laptop without a C++ compiler skips this; CI has one."""
    require(None if shutil.which("g++") else "no C++ compiler")
    options = (2, *fashion(160, 10), "--log-interval", 1)
    env = {"LADDER_DTYPE": "float64"}
    launch = TORCHRUN.format(1)
    expected = losses(run(launch, *options, "--snapshot-path", "eager.pt", **env))
    text = run(launch, *options, "--compile", TORCH_LOGS="graph_code", **env)
    assert len(losses(text)) == 10 and losses(text) == pytest.approx(expected, abs=1e-6)
    assert "TRACED GRAPH" in text  # something was compiled
    compiled, eager = load(tmp_path / "checkpoint.pt"), load(tmp_path / "eager.pt")
    assert list(compiled["model"]) == list(eager["model"])
    assert difference(compiled, eager) < 1e-10
