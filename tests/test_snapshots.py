"""A snapshot is whole or not at all, of finite weights, and never lost to a run that did not ask.

What a resumed run ends with: test_resume.py.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.files import load
from helpers.jobs import LONG, SCRIPTS, TORCHRUN, every_form, every_script

SPAWN = "ddp_spawn.py"
MLP = ("--model", "mlp")
NOT_FINITE = "error: weights are NaN or infinite, so they are not saved: try a lower --lr"
EXISTS = "checkpoint.pt exists: continue with --resume, or delete it"


@every_script
def test_what_a_snapshot_holds(do, script):
    """In a folder that was not there."""
    job = do(script, 1, *MLP, "--snapshot-path", "new/folder/own.pt")
    snapshot = load(Path("new/folder/own.pt"))
    assert snapshot.keys() == {"model", "optimizer", "epoch"} and snapshot["epoch"] == 1
    assert {*snapshot["model"]} == {*job.model.state_dict()}  # no prefix
    assert len(snapshot["optimizer"]["state"]) == len([*job.model.parameters()])
    options = (*MLP, "--snapshot-path", "new/folder/own.pt", "--resume", "--momentum", 0.5)
    do(script, 2, *options)  # whose momentum is this run's
    assert load(Path("new/folder/own.pt"))["optimizer"]["param_groups"][0]["momentum"] == 0.5


@every_form
def test_a_snapshot_is_written_whole_or_not_at_all(do, monkeypatch, script):
    """Killed while it writes, or with a full disk, a script leaves the snapshot before."""
    save = torch.save

    def failing(snapshot: dict, file: str) -> None:
        save(snapshot, file)
        if snapshot["epoch"] == 2:
            Path(file).write_bytes(Path(file).read_bytes()[:100])
            raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OSError, match="the disk is full"):
        do(script, 3, *MLP)
    assert load(Path("checkpoint.pt"))["epoch"] == 1


@pytest.mark.parametrize("script", (*SCRIPTS, LONG))
def test_a_snapshot_that_exists_is_refused_by_rank_0(refuse, parse, monkeypatch, tmp_path, script):
    """Before data is loaded or a process started. Other ranks may have one, on their own disks."""
    (tmp_path / "checkpoint.pt").touch()
    assert refuse(script, "--snapshot-path", "checkpoint.pt") == EXISTS
    assert parse(script, "--resume")[1].resume
    if script in (*SCRIPTS[3:], LONG):
        monkeypatch.setenv("RANK", "1")
        assert not parse(script)[1].resume


def test_a_refusal_of_rank_0_ends_the_others(run, tmp_path):
    (tmp_path / "checkpoint.pt").write_text("an earlier run's")
    text = run(TORCHRUN.format(2), status=1)
    assert text.count(f"error: {EXISTS}\n") == 1 and "Epoch " not in text
    assert (tmp_path / "checkpoint.pt").read_text() == "an earlier run's"


@every_form
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_weights_that_are_nan_or_infinite_are_not_saved(do, monkeypatch, script, bad):
    def spoil(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.param_groups[0]["params"][-1].data[-1] = bad

    do(script, 1, *MLP)
    monkeypatch.setattr(torch.optim.SGD, "step", spoil)
    with pytest.raises(SystemExit, match=NOT_FINITE):
        do(script, 2, *MLP, "--resume")
    assert load(Path("checkpoint.pt"))["epoch"] == 1


@pytest.mark.parametrize(("rank", "resume"), [(0, True), (1, False), (1, True)])
def test_rank_0_alone_reads_and_writes_and_all_load_what_it_has_read(do, monkeypatch, rank, resume):
    """Whatever lies on the disks of other machines, and whether or not these have --resume."""
    job, own, sent = do(SPAWN, 2, *MLP), Path("checkpoint.pt"), []
    rank_0s = load(own)
    if rank == 1:
        own.write_text("another run's")

    def broadcast(snapshots: list) -> None:
        sent.append(snapshots[0] and snapshots[0]["epoch"])
        snapshots[:] = [rank_0s | {"epoch": 7}]

    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    job.args.resume, model = resume, type(job.model)()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    assert job.module.load_snapshot(job.args, model, optimizer) == 7
    assert sent == [None if rank else 2]
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, rank_0s["model"][name])
    job.module.save_snapshot(job.args, model, optimizer, 8)
    assert rank == 0 or own.read_text() == "another run's"
