"""torchrun, and the launcher before it, start ddp_torchrun.py, and report what has failed."""

import re

import pytest
from helpers.files import difference, load
from helpers.jobs import TORCHRUN, epochs
from helpers.ranks import train


def test_a_report_shows_which_rank_has_failed_and_its_traceback(run, fashion):
    text = run(TORCHRUN.format(2), 3, *fashion(200, 10), status=1, LADDER_RAISE="1:7")
    assert [line["epoch"] for line in epochs(text)] == [0]
    report = text.split("Root Cause (first observed failure):")[1]
    assert "rank      : 1 (local_rank: 1)" in report
    assert "ArithmeticError: the test's own error" in report
    assert re.search(r'ddp_torchrun.py", line \d+, in train_epoch', report)


@pytest.mark.parametrize("option", ["--local_rank=1", "--local-rank=1"])
def test_the_option_of_older_launchers_is_ignored(parse, option):
    assert parse("ddp_torchrun.py", option)[1].device == "cpu"


@pytest.mark.slow("another launcher")
def test_the_launcher_before_torchrun(run, tmp_path, fashion):
    options = (1, *fashion(100, 10))
    launch = "python -m torch.distributed.launch --nproc_per_node=2 ddp_torchrun.py"
    text = run(launch, *options, MASTER_PORT=0)
    assert "FutureWarning" in text and "[rank 1 of 2] on cpu, from epoch 0\n" in text
    train(tmp_path, "ddp_torchrun.py", 2, *options, "--snapshot-path", "other.pt")
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "other.pt")) == 0
