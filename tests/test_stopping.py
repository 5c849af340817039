"""Who stops when, who waits for whom, and what a parent does about it. In the tests' process."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import SCRIPTS
from helpers.parts import CPU

from common.data import make_digits

every_parent = pytest.mark.parametrize("script", ["ddp_spawn.py", "multinode.py"])


def test_all_stop_when_one_must(make, monkeypatch):
    module, trainer = make("ddp_torchrun.py", "--batch-size", 2)
    trainer.asked, trainer.ask_every = time.perf_counter(), 10
    assert trainer._stop_agreed(10, last=False) == 0
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, op: tensor.fill_(2))
        trainer.ask_every = 10
        assert trainer._stop_agreed(3, last=False) == 0
        assert trainer._stop_agreed(3, last=True) == 2
        trainer.ask_every = 10
        assert trainer._stop_agreed(10, last=False) == 2
    trainer.ask_every = 10
    module.on_stop_signal(signal.SIGINT, None)
    try:
        assert trainer._stop_agreed(10, last=False) == signal.SIGINT
    finally:
        module.stop_signal = 0
    monkeypatch.setattr(module, "LAUNCHER", -1)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    trainer.ask_every = 10
    assert trainer._stop_agreed(10, last=False) == signal.SIGTERM  # torchrun was killed


def test_slow_steps_are_asked_after_each(make, monkeypatch):
    """Ten of them may take longer than torchrun waits for a stop."""
    _, trainer = make("ddp_torchrun.py", "--batch-size", 2)
    trainer.asked, trainer.ask_every = time.perf_counter(), 1
    asked, all_reduce = [], dist.all_reduce
    counted = lambda *args, **kwargs: asked.append(1) or all_reduce(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(dist, "all_reduce", counted)
    for seconds, every in ((2, 1), (0, 10), (11, 1), (2, 1), (0, 10), (9, 10)):
        trainer.asked -= seconds
        assert trainer._stop_agreed(10, last=False) == 0 and trainer.ask_every == every
    assert len(asked) == 6
    trainer._stop_agreed(11, last=False)
    assert len(asked) == 6


def test_a_stopped_epoch_is_saved_and_gives_the_signals_status(make, monkeypatch, capsys):
    _, trainer = make("ddp_torchrun.py", 9, "--batch-size", 8)
    saved = []
    monkeypatch.setattr(trainer, "_save_snapshot", lambda: saved.append(trainer.samples_seen))
    monkeypatch.setattr(trainer, "_stop_agreed", lambda step, last: 15 if step == 3 else 0)
    capsys.readouterr()
    assert trainer.train(9) == signal.SIGTERM
    assert saved == [24]
    assert capsys.readouterr().out.endswith("\nEpoch 0 | Stopped at sample 24, saved\n")


@pytest.mark.parametrize(
    ("signum", "status"), [(0, 0), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_the_status_of_ddp_torchrun(make, monkeypatch, parse, signum, status):
    module, args = parse("ddp_torchrun.py")
    data = (make_digits(40, 0), make_digits(10, 1))
    monkeypatch.setattr(module, "load_dataset", lambda *_: data)
    monkeypatch.setattr(module.Trainer, "train", lambda self, total_epochs: signum)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert module.main(args) == status


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "ddp_torchrun.py"])
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_is_said_once_and_ends_the_process(parse, monkeypatch, script, signum, status):
    module, _ = parse(script)
    given, written = [], []
    monkeypatch.setattr(signal, "signal", lambda *args: given.append(args))
    monkeypatch.setattr(os, "write", lambda *args: written.append(args))
    with pytest.raises(SystemExit) as caught:
        module.stop(signum, None)
    assert caught.value.code == status
    assert given == [(signum, signal.SIG_IGN)]
    assert written == [(2, b"stopped: --resume goes on from the last snapshot\n")]


def spawned(parse, monkeypatch, script: str, join) -> list:
    """What happens while the script's parent starts two processes and joins them."""
    events = []
    children = [SimpleNamespace(kill=lambda: events.append("kill")) for _ in range(2)]
    context = SimpleNamespace(processes=children, join=join)
    module, args = parse(script)
    monkeypatch.setattr(mp, "spawn", lambda *_, join: events.append("spawn") or context)
    monkeypatch.setattr(mp, "active_children", lambda: children)
    monkeypatch.setattr(signal, "signal", lambda *given: events.append(given))
    try:
        module.spawn((args,), 2)
    except SystemExit as error:
        events.append(error.code)
    return events


@every_parent
@pytest.mark.parametrize("code", [1, 143, -9])
def test_a_parent_passes_on_a_status_and_kills_who_is_left(parse, monkeypatch, script, code):
    def join(grace_period):
        raise mp.ProcessExitedException("process 1 terminated ...", 1, 1, code)

    events = spawned(parse, monkeypatch, script, join)
    start = events.index("spawn")
    assert events[start - 1] == (signal.SIGINT, signal.SIG_IGN)  # children inherit it
    assert events[start + 1][0] == signal.SIGINT and events[start + 1][1].__name__ == "stop"
    killed = "error: process 1 terminated ...: --resume goes on from the last snapshot"
    assert events[-3:] == ["kill", "kill", killed if code < 0 else code]


@every_parent
def test_a_parent_waits_for_as_long_as_nobody_asks_it_to_stop(parse, monkeypatch, script):
    joined = iter([False] * 99 + [True])
    events = spawned(parse, monkeypatch, script, lambda grace_period: next(joined))
    assert not [*joined] and events[-1] == "kill"


@every_parent
def test_a_process_whose_parent_was_killed_meanwhile_ends(make, monkeypatch, script):
    parents = iter([SimpleNamespace(is_alive=lambda: False)])
    monkeypatch.setattr(mp, "parent_process", lambda: next(parents))
    with pytest.raises(SystemExit, match="1"):
        make(script)


@pytest.mark.parametrize("script", SCRIPTS[3:])
def test_one_after_the_other_prepares_the_data(parse, monkeypatch, script):
    """Rank 0, then the first process of each other node, then all: each but once."""
    data, calls = (make_digits(10, 0), make_digits(10, 1)), []
    module, args = parse(script)
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr(module, "load_dataset", lambda *_: calls.append("data") or data)
    for rank, local_rank, turn in ((0, 0, 0), (2, 0, 1), (1, 1, 2), (3, 1, 2)):
        calls.clear()
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        module.load_train_objs(args, *((local_rank,) if script == "multinode.py" else ()), CPU)
        expected = ["barrier"] * 3
        expected.insert(turn, "data")
        assert calls == expected
