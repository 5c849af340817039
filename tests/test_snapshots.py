"""A snapshot is whole or not at all, any script loads it, and what does not fit is refused.

Nearly all in the tests' process. What a resumed run ends with: test_resume.py.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.files import load
from helpers.jobs import ROOT, SCRIPTS, every_ddp_script, every_form
from helpers.ranks import train
from torch.multiprocessing import ProcessExitedException

SINGLE, TORCHRUN = SCRIPTS[0], SCRIPTS[3]
MLP = ("--model", "mlp")
NOT_FINITE = "weights are NaN or infinite, so they are not saved: try a lower --lr"


@every_form
def test_what_a_snapshot_holds(do, script):
    job = do(script, 1, *MLP, "--snapshot-path", "own.pt", "--resume")
    assert "No snapshot at own.pt, starting from the beginning\n" in job.text
    snapshot = load(Path("own.pt"))
    assert {*snapshot["model"]} == {*job.model.state_dict()}  # no prefix
    assert snapshot["args"]["batch_size"] == "32"  # of any type, so all are strings
    assert snapshot.keys() - {"samples_seen"} == {"model", "optimizer", "epoch", "args"}


@every_form
def test_a_snapshot_is_written_whole_or_not_at_all(do, monkeypatch, script):
    """Killed while it writes, or with a full disk, a script leaves the snapshot before."""
    save, replace, found = torch.save, os.replace, []

    def replacing(new: str, old: str) -> None:
        found.append([load(Path(path))["epoch"] for path in (old, new) if Path(path).exists()])
        replace(new, old)

    def failing(snapshot: dict, file: str) -> None:
        save(snapshot, file)
        if snapshot["epoch"] == 3:
            Path(file).write_bytes(Path(file).read_bytes()[:100])
            raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", replacing)
    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OSError, match="the disk is full"):
        do(script, 3, *MLP)
    assert found == [[1], [1, 2]] and load(Path("checkpoint.pt"))["epoch"] == 2


@every_form
def test_a_new_run_keeps_the_snapshot_of_an_earlier_one(do, monkeypatch, script):
    """Rank 0 renames it. A run that is resumed leaves it."""
    options = (script, 1, *MLP, "--snapshot-path", "own.pt")
    own, old, line = Path("own.pt"), Path("own.pt.old"), "earlier run is now own.pt.old\n"
    do(*options)
    saved = own.read_bytes()
    assert line not in do(*options, "--resume").text and not old.exists()
    if script != SINGLE:
        module = do.module(script)
        with monkeypatch.context() as patch:  # rank 1 of two, until DDP is made
            patch.setattr(dist, "get_rank", lambda *_: 1)
            patch.setattr(dist, "get_world_size", lambda: 2)
            patch.setattr(module, "ddp_setup", lambda *_: torch.device("cpu"))
            patch.setattr(module, "same_on_all_ranks", lambda _: None, raising=False)
            patch.setattr(module, "DDP", lambda *_, **__: 1 / 0)
            main = getattr(module.main, "__wrapped__", module.main)
            do.last.args.resume = False
            with pytest.raises(ZeroDivisionError):
                main(*([] if script == TORCHRUN else [1]), do.last.args)
        assert own.read_bytes() == saved and not old.exists()
    assert line in do(*options).text and old.read_bytes() == saved


def refused(call: Callable, *given: object) -> str:
    """The line that it ends with. The snapshot is as before."""
    before = Path("checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit) as caught:
        call(*given)
    assert Path("checkpoint.pt").read_bytes() == before
    assert caught.value.code.startswith("error: ") and "\n" not in caught.value.code
    return caught.value.code.removeprefix("error: ")


@every_form
def test_weights_that_are_nan_or_infinite_are_not_saved(do, monkeypatch, script):
    """The weights are looked at, because there may be no validation set. A buffer may be infinite,
    as a mask is."""
    module = do(script, 1, *MLP).module
    build_model, train_epoch = module.build_model, module.train_epoch

    def masked(*given: object) -> torch.nn.Module:
        model = build_model(*given)
        model.register_buffer("mask", torch.tensor(-torch.inf))
        return model

    def spoil(model: torch.nn.Module, *given: object) -> torch.Tensor:
        sums = train_epoch(model, *given)
        [*model.parameters()][-1].data[-1] = torch.inf
        return sums

    with monkeypatch.context() as patch:
        patch.setattr(module, "train_epoch", spoil)
        assert refused(do, script, 2, *MLP, "--resume") == NOT_FINITE
    monkeypatch.setattr(module, "build_model", masked)
    do(script, 1, *MLP)
    assert load(Path("checkpoint.pt"))["model"]["mask"] == -torch.inf


def test_one_bad_batch_ends_all_ranks(tmp_path, fashion):
    """That of one rank, in the second epoch. The snapshot of the first one stays."""
    text, line = (ROOT / "ddp_spawn.py").read_text(), "        optimizer.zero_grad()\n"
    bad = f"        if dist.get_rank() == epoch == 1:\n            inputs[0] = torch.nan\n{line}"
    (tmp_path / "ddp_spawn.py").write_text(text.replace(line, bad))
    with pytest.raises(ProcessExitedException, match="exit code 1"):
        train(tmp_path, tmp_path / "ddp_spawn.py", 2, 3, *fashion(16, 4))
    said = "".join(path.read_text() for path in tmp_path.glob("output-?"))
    assert f"\nerror: {NOT_FINITE}\n" in said and "Traceback" not in said
    assert load(tmp_path / "checkpoint.pt")["epoch"] == 1


@every_form
def test_saved_before_evaluation_because_that_may_fail(do, monkeypatch, script):
    monkeypatch.setattr(do.module(script), "evaluate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        do(script, 2, *MLP)
    assert load(Path("checkpoint.pt"))["epoch"] == 1


@pytest.mark.parametrize("script", (SINGLE, TORCHRUN))
def test_a_run_with_another_setting_is_refused(do, script):
    settings = {"model": ("mlp", "convnet"), "momentum": (0.5, 0.25), "seed": (7, 8)}
    settings["dataset"] = ("mnist", "fashion-mnist")
    if script == TORCHRUN:
        settings["warm_up"] = (1, 2)
    for name, (then, now) in settings.items():
        options = (script, 1, *MLP, f"--{name}".replace("_", "-"))
        do(*options, then)
        line = f"checkpoint.pt was made with {name} {then}, not {now}"
        assert refused(do, *options, now, "--resume") == line
    if script == TORCHRUN:
        do(script, 1, *MLP, "--cosine")
        line = "checkpoint.pt was made with cosine True, not False"
        assert refused(do, script, 1, *MLP, "--resume") == line


def test_a_snapshot_within_an_epoch_is_for_ddp_torchrun_alone(do):
    do(TORCHRUN, 1, *MLP)
    torch.save({**load(Path("checkpoint.pt")), "samples_seen": 32, "epoch": 0}, "checkpoint.pt")
    line = "checkpoint.pt was saved within an epoch: resume it with ddp_torchrun.py"
    assert refused(do, SINGLE, 1, *MLP, "--resume") == line
    assert do(TORCHRUN, 1, *MLP, "--resume").passes[0][-1] == 32


@every_ddp_script
def test_rank_0_alone_writes_and_ddp_ends_before_its_group(do, monkeypatch, script):
    job = do(script, 1, *MLP)
    assert job.calls[1:] == [("destroy_process_group",)]
    Path("checkpoint.pt").unlink()
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    job.module.save_snapshot(job.args, {"model": job.model, "optimizer": job.model}, 1)
    assert not Path("checkpoint.pt").exists()
