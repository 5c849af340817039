"""A resumed run ends as one that never stopped, whichever rung and however many processes go on."""

import re
from pathlib import Path

import pytest
import torch
from helpers.files import difference, load, same_bytes
from helpers.jobs import ROOT, epochs, every_form
from helpers.ranks import train


@every_form
def test_one_process_with_any_optimizer(do, monkeypatch, script):
    """With dropout, whose masks are the same only if they are seeded as before, and to the bytes.
    The learning rate is this run's, because it may change."""
    monkeypatch.setattr(torch.optim, "SGD", lambda weights, lr, **_: torch.optim.AdamW(weights, lr))
    options = ("--batch-size", 8, "--lr", 0.001)
    do(script, 3, *options, "--snapshot-path", "whole.pt")
    do(script, 1, *options)
    before = load(Path("checkpoint.pt"))
    text = do(script, 3, *options, "--resume").text
    assert "from epoch 1\n" in text and [line["epoch"] for line in epochs(text)] == [1, 2]
    after, whole = load(Path("checkpoint.pt")), load(Path("whole.pt"))
    assert (before["epoch"], after["epoch"]) == (1, 3) and same_bytes(after, whole)
    assert difference(before, whole) > 1e-3
    do(script, 4, "--batch-size", 8, "--lr", 0.002, "--resume")
    assert load(Path("checkpoint.pt"))["optimizer"]["param_groups"][0]["lr"] == 0.002


@pytest.mark.parametrize("script", ["ddp_spawn.py", "ddp_torchrun.py", "multinode.py"])
def test_two_processes_end_with_the_same_bytes(tmp_path, fashion, script):
    """With three or more the order of summation matters, and DDP changes it after a step."""
    options = (*fashion(100, 10), "--model", "convnet", "--batch-size", 8)
    whole = epochs(train(tmp_path, script, 2, 3, *options, "--snapshot-path", "whole.pt"))
    first = epochs(train(tmp_path, script, 2, 1, *options))
    text = train(tmp_path, script, 2, 3, *options, "--resume")
    assert "[rank 1 of 2] on cpu, from epoch 1\n" in text
    parts = [{**line, "rate": 0} for line in first + epochs(text)]
    assert len(parts) == 3 and parts == [{**line, "rate": 0} for line in whole]
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))


@pytest.mark.slow("160 MB")
def test_a_snapshot_takes_four_times_its_size_for_a_moment(tmp_path, fashion):
    """While it is loaded, three times on rank 0. The optimizer's state stays, half of it."""
    code, loads = (ROOT / "ddp_torchrun.py").read_text(), "    first_epoch = load_snapshot"
    layers = "torch.nn.Flatten(), torch.nn.Linear(784, 25000), torch.nn.Linear(25000, 10)"
    code = code.replace("build_model(args.model, args.dataset)", f"torch.nn.Sequential({layers})")
    look = '    print(open("/proc/self/status").read())\n'
    (tmp_path / "train.py").write_text(
        code.replace(loads, look + loads).replace("    if rank ==", f"{look}    if rank ==", 1)
    )
    for resume in ((), ("--resume",)):
        train(tmp_path, tmp_path / "train.py", 2, 1, *fashion(16, 4), "--batch-size", 8, *resume)
    size = (tmp_path / "checkpoint.pt").stat().st_size / 1024
    for rank, times in ((0, 3), (1, 4)):
        text = (tmp_path / f"output-{rank}").read_text()
        names = ("VmRSS", "VmHWM", "RssAnon")
        now, peak, own = (re.findall(rf"{name}:\s+(\d+)", text) for name in names)
        assert (int(peak[1]) - int(now[0])) / size == pytest.approx(times, abs=0.4)
        assert (int(own[1]) - int(own[0])) / size == pytest.approx(0.5, abs=0.2)
