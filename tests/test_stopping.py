"""Who stops when, who waits for whom, and what a parent does about it. In the tests' process."""

import atexit
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import SCRIPTS
from helpers.parts import CPU, every_ddp_script, every_script, every_torchrun_script

from common.data import make_digits


@every_ddp_script
def test_all_stop_when_one_must(make, monkeypatch, script):
    module, trainer = make(script, "--batch-size", 2)
    assert trainer._stop_agreed(10) == 0
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, op: tensor.fill_(2))
        assert (trainer._stop_agreed(3), trainer._stop_agreed(10)) == (0, 2)
    monkeypatch.setattr(mp, "parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    monkeypatch.setattr(module, "LAUNCHER", -1, raising=False)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    assert trainer._stop_agreed(10) == signal.SIGTERM  # the launcher is dead


@every_ddp_script
def test_slow_steps_are_asked_after_each(make, monkeypatch, script):
    """Ten of them may take longer than torchrun, Slurm or a parent waits for a stop."""
    _, trainer = make(script, "--batch-size", 2)
    asked, all_reduce = [], dist.all_reduce
    counted = lambda *args, **kwargs: asked.append(1) or all_reduce(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(dist, "all_reduce", counted)
    for seconds, every in ((2, 1), (0, 10), (11, 1), (2, 1), (0, 10), (9, 10)):
        trainer.asked -= seconds
        assert trainer._stop_agreed(10) == 0 and trainer.ask_every == every
    assert len(asked) == 6
    trainer._stop_agreed(11)
    assert len(asked) == 6


@every_ddp_script
def test_whoever_waits_says_for_whom(make, monkeypatch, capsys, script):
    module, trainer = make(script)
    timers = []

    class Timer:
        def __init__(self, seconds, function, args):
            timers.append(self)
            self.seconds, self.call, self.cancelled = seconds, lambda: function(*args), False

        def start(self):
            assert not self.cancelled

        def cancel(self):
            self.cancelled = True

    monkeypatch.setattr(module.threading, "Timer", Timer)
    monkeypatch.setattr(dist, "barrier", lambda: timers[-1].call())
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    trainer.rank = trainer.args.local_rank = 1
    capsys.readouterr()
    trainer._save_snapshot()
    expected = "[rank 1] still waiting for rank 0, which saves the snapshot\n"
    assert capsys.readouterr().out == expected
    if script != "ddp_spawn.py":  # its parent prepares the data
        monkeypatch.setattr(module, "load_dataset", lambda *_: (make_digits(10, 0),) * 2)
        module.load_train_objs(trainer.args, CPU)
        expected = "[rank 1] still waiting for the first process of each node, which prepares "
        assert capsys.readouterr().out.startswith(expected)
        trainer.args.local_rank = 0
        module.load_train_objs(trainer.args, CPU)
        expected = "[rank 1] still waiting for the other nodes, which prepare the data\n"
        assert capsys.readouterr().out == expected
    assert all(timer.seconds == 10 and timer.cancelled for timer in timers)


@pytest.mark.parametrize("script", ["ddp_spawn.py", "multinode.py"])
def test_a_parent_passes_on_signals_and_a_status_and_kills_who_is_left(parse, monkeypatch, script):
    events, data = [], (make_digits(10, 0), make_digits(10, 1))
    child = SimpleNamespace(kill=lambda: events.append("kill"))

    def join(timeout, grace_period):
        raise mp.ProcessExitedException("rank 1", error_index=1, error_pid=1, exit_code=143)

    module, args = parse(script)
    context = SimpleNamespace(processes=[child, child], join=join)
    monkeypatch.setattr(mp, "spawn", lambda *_, join: events.append("spawn") or context)
    monkeypatch.setattr(signal, "signal", lambda *given: events.append(given))
    monkeypatch.setattr(module, "load_dataset", lambda *_: data)
    with pytest.raises(SystemExit, match="143"):
        module.spawn(args, torch.zeros((), dtype=torch.int32))
    start = events.index("spawn")
    assert events[start - 1] == (signal.SIGINT, signal.SIG_IGN)  # children inherit it
    assert [number for number, _ in events[start + 1 : -2]] == [signal.SIGINT, signal.SIGTERM]
    assert events[-2:] == ["kill", "kill"]


def test_a_parent_told_to_stop_while_it_loads_starts_nobody(parse, monkeypatch):
    module, args = parse("ddp_spawn.py")
    handlers, data = {}, (make_digits(10, 0), make_digits(10, 1))

    def load_dataset(*_):
        handlers[signal.SIGTERM](signal.SIGTERM, None)
        return data

    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(module, "load_dataset", load_dataset)
    monkeypatch.setattr(mp, "spawn", lambda *_, **__: pytest.fail("processes are started"))
    with pytest.raises(SystemExit, match="143"):
        module.spawn(args, torch.zeros((), dtype=torch.int32))


@every_ddp_script
def test_a_process_leaves_before_python_ends_but_after_what_is_registered(
    parse, monkeypatch, script
):
    module, _ = parse(script)
    calls = []
    monkeypatch.setattr(threading, "_shutdown", lambda: calls.append("threads"))
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: calls.append("registered"))
    monkeypatch.setattr(os, "_exit", calls.append)
    module.leave(143)
    assert calls == ["threads", "registered", 143]


@every_torchrun_script
def test_the_first_process_of_a_host_prepares_the_data(parse, monkeypatch, script):
    calls, data = [], (make_digits(10, 0), make_digits(10, 1))
    module, args = parse(script)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr(module, "load_dataset", lambda *_: calls.append("data") or data)
    for args.local_rank, expected in ((0, ["data", "barrier"]), (1, ["barrier", "data"])):
        calls.clear()
        module.load_train_objs(args, CPU)
        assert calls == expected


@pytest.mark.parametrize("script", ["ddp_spawn.py", "multinode.py"])
@pytest.mark.parametrize("how", ["hangs", "killed"])
def test_a_parent_ends_a_job_of_which_a_rank_hangs_or_is_killed(
    parse, monkeypatch, capsys, script, how
):
    stop, events = torch.zeros((), dtype=torch.int32), []
    child = SimpleNamespace(kill=lambda: events.append("kill"))

    def join(timeout, grace_period):
        if how == "killed":
            raise mp.ProcessExitedException(
                "process 1 terminated with signal SIGKILL", 1, 1, -9, "SIGKILL"
            )
        assert len(events) < 99
        events.append(timeout)
        stop.fill_(signal.SIGTERM)
        return False

    module, args = parse(script)
    monkeypatch.setattr(
        mp, "spawn", lambda *_, **__: SimpleNamespace(processes=[child, child], join=join)
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(module, "load_dataset", lambda *_: (make_digits(10, 0),) * 2)
    said = "^error: process 1 .* SIGKILL: --resume goes on" if how == "killed" else "143"
    with pytest.raises(SystemExit, match=said):
        module.spawn(args, stop)
    assert events == ([1] * 26 if how == "hangs" else []) + ["kill", "kill"]
    assert ("error: not all ranks stopped" in capsys.readouterr().out) == (how == "hangs")


@pytest.mark.parametrize("script", ["ddp_spawn.py", "multinode.py"])
def test_a_parent_waits_for_as_long_as_nobody_asks_it_to_stop(parse, monkeypatch, script):
    seconds = iter([False] * 99 + [True])
    context = SimpleNamespace(processes=[], join=lambda **_: next(seconds))
    module, args = parse(script)
    monkeypatch.setattr(mp, "spawn", lambda *_, **__: context)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(module, "load_dataset", lambda *_: (make_digits(10, 0),) * 2)
    module.spawn(args, torch.zeros((), dtype=torch.int32))
    assert not [*seconds]


@every_script
def test_a_stopped_job_ends_with_the_signals_status(make, parse, monkeypatch, script):
    module, _ = parse(script)

    class Trainer(module.Trainer):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            self.stopped = signal.SIGTERM

    monkeypatch.setattr(module, "Trainer", Trainer)
    if script in SCRIPTS[:2]:
        with pytest.raises(SystemExit, match="143"):
            make(script)
    else:
        make(script)
        assert make.calls[-1] == 143
