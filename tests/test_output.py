"""Every line and figure that is printed, and who prints it. In the tests' process."""

import ast
import os
import re
import runpy
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import ROOT, SCRIPTS
from helpers.parts import every_ddp_script, every_script, inner, two_devices

from common.data import make_digits


@every_ddp_script
def test_rank_1_is_quiet(make, monkeypatch, capsys, script):
    module, _ = make(script)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    capsys.readouterr()
    module.log("of the job")
    module.log("of every rank", every_rank=True)
    assert capsys.readouterr().out == "of every rank\n"


@every_ddp_script
def test_events_are_written_by_rank_0_alone(make, monkeypatch, script):
    writer = SimpleNamespace(SummaryWriter=lambda *args, **kwargs: "a writer")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    assert make(script, "--log-dir", "runs")[1].writer == "a writer"
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    assert make(script, "--log-dir", "runs")[1].writer is None


@pytest.fixture
def clock(monkeypatch):
    """A list of one number: what time.perf_counter gives."""
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def pass_time(clock: list[float], seconds: float) -> None:
    clock[0] += seconds


@every_script
def test_the_line_of_an_epoch(make, monkeypatch, capsys, clock, script):
    """What sums are divided by, and which seconds count: 2 of training, 2 of waiting for the device
    and none of the 100 of evaluation. The epoch is entered at sample 16 of 40."""
    _, trainer = make(script, 9, 2, "--snapshot-path", "own.pt")
    scalars = []

    def run_epoch(epoch: int) -> None:
        pass_time(clock, 2)
        trainer.samples_seen = 40
        trainer.loss_sum += 10

    def evaluate() -> tuple[torch.Tensor, torch.Tensor]:
        pass_time(clock, 100)
        return torch.tensor(5.0), torch.tensor(7.0)

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: pass_time(clock, 2))
    monkeypatch.setattr(trainer, "_run_epoch", run_epoch)
    monkeypatch.setattr(trainer, "_evaluate", evaluate)
    monkeypatch.setattr(trainer, "_save_snapshot", lambda: None)
    monkeypatch.setattr(trainer.schedule, "step", lambda: None)
    trainer.device, trainer.epoch, trainer.samples_seen = torch.device("cuda"), 2, 16
    trainer.writer = SimpleNamespace(
        add_scalar=lambda *given: scalars.append(given), flush=lambda: scalars.append("flushed")
    )
    capsys.readouterr()
    trainer.train(4)
    losses = "Train loss: 0.2500 | Test loss: 0.5000 | Accuracy: 7/10 (70.00%)"
    assert capsys.readouterr().out == (
        f"Epoch 2 | {losses} | 6 samples/s\n"
        f"Epoch 3 | {losses} | 10 samples/s\n"
        "Epoch 3 | Training checkpoint saved at own.pt\n"
    )
    assert scalars[:5] == [
        ("loss/train", 0.25, 2),
        ("loss/test", 0.5, 2),
        ("accuracy", pytest.approx(0.7), 2),
        ("samples_per_second", 6, 2),
        "flushed",
    ]


@every_script
def test_the_lines_of_the_start_of_a_stop_and_of_a_resume(make, capsys, script):
    path = ("--snapshot-path", "own.pt")
    _, trainer = make(script, 7, 3, "--batch-size", 5, *path, "--resume")
    text = capsys.readouterr().out
    assert "total_epochs: 7, save_every: 3, batch_size: 5\n" in text
    assert "No snapshot at own.pt, starting from the beginning\n" in text

    def run_epoch(epoch: int) -> None:
        trainer.samples_seen, trainer.stopped = 24, signal.SIGTERM

    trainer._run_epoch, trainer.epoch = run_epoch, 4
    trainer.train(7)
    assert capsys.readouterr().out == "Epoch 4 | Stopped at sample 24, saved at own.pt\n"
    make(script, *path, "--resume")
    text = capsys.readouterr().out
    assert "total_epochs: 7, save_every: 3, batch_size: 5\n" in text
    assert "Resuming training from snapshot at Epoch 4, sample 24\n" in text


@every_script
def test_the_lines_of_steps_and_the_sums_of_an_epoch(make, capsys, script):
    """A learning rate of 0 leaves the weights as they are, so all can be computed afterwards."""
    options = ("--batch-size", 16, "--log-interval", 1, "--lr", 0, "--test-batch-size", 3)
    _, trainer = make(script, "--model", "mlp", *options)
    model, loss = inner(trainer), torch.nn.functional.cross_entropy
    capsys.readouterr()
    trainer._run_epoch(1)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "[CPU0] Epoch 1 | Batchsize: 16 | Steps: 3"
    expected = [loss(model(source), targets).item() for source, targets in trainer.train_data]
    steps = [
        re.fullmatch(r"Epoch 1 \| Step (\d) \| Loss: (\d\.\d{6})", li).groups() for li in lines
    ]
    assert [int(step) for step, _ in steps] == [1, 2, 3]
    assert [float(value) for _, value in steps] == pytest.approx(expected, abs=2e-6)
    sizes = (13, 13, 14)
    total = sum(size * value for size, value in zip(sizes, expected, strict=True))
    assert trainer.loss_sum.item() == pytest.approx(total, rel=1e-5)
    assert trainer.samples_seen == 40
    source, targets = trainer.test_data.dataset[[*range(10)]]
    output = model(source)
    test_loss, correct = trainer._evaluate()
    assert test_loss.item() == pytest.approx(10 * loss(output, targets).item(), rel=1e-5)
    assert correct == (output.argmax(1) == targets).sum()


@every_script
def test_an_epochs_first_line_names_the_device_and_the_rank(make, monkeypatch, capsys, script):
    module, trainer = make(script, "--batch-size", 8)
    trainer.rank, bars = 1 if script in SCRIPTS[2:] else 0, []
    monkeypatch.setattr(module, "log", lambda line, **_: print(line))
    monkeypatch.setattr(module, "tqdm", lambda *_, disable, **__: bars.append(disable) or Bar())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    capsys.readouterr()
    for type, name in (("cuda", "GPU"), ("xpu", "XPU")):
        trainer.device, trainer.samples_seen = torch.device(type), 40  # no steps
        trainer._run_epoch(3)
        line = f"[{name}{trainer.rank}] Epoch 3 | Batchsize: 8 | Steps: 0\n"
        assert capsys.readouterr().out == line and bars.pop() == bool(trainer.rank)


class Bar(list):
    def close(self) -> None:
        pass


@every_ddp_script
def test_the_line_of_a_rank(parse, monkeypatch, capsys, script):
    module, args = parse(script)
    args.store = "store"
    args.device, args.rank, args.local_rank, args.local_world_size = "cuda", 1, 1, 2
    args.world_size = 2
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(socket, "gethostname", lambda: "thathost")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(module, "join", lambda *_: None, raising=False)
    module.ddp_setup(args)
    line = "[rank 1 of 2] host thathost | device cuda:1 | backend nccl | threads 4\n"
    assert capsys.readouterr().out == line


def test_data_parallel_says_over_how_many_devices_it_splits(make, monkeypatch, capsys):
    make("data_parallel.py")
    line = "DataParallel on cpu | Batches are not split: there is one device\n"
    assert line in capsys.readouterr().out
    monkeypatch.setattr(torch.nn.DataParallel, "__init__", two_devices)
    make("data_parallel.py")
    assert "DataParallel on cpu | Batches are split over 2 devices\n" in capsys.readouterr().out


@every_script
def test_the_total_time_is_in_seconds(make, parse, monkeypatch, capsys, script):
    now = [1000.0]

    def perf_counter() -> float:
        now[0] += 1e-6
        return now[0]

    done = SimpleNamespace(processes=[], join=lambda **_: True)
    data, check = (make_digits(40, 0), make_digits(10, 1)), lambda *_: pass_time(now, 2.5)
    monkeypatch.setattr("time.perf_counter", perf_counter)
    if script in SCRIPTS[3:]:
        monkeypatch.setattr(parse(script)[0], "check_batch_norm", check)
        make(script, "--model", "mlp")
    else:  # as it is started; `make` is here for what it holds back and puts in order
        monkeypatch.setattr("common.data.load_dataset", lambda *_: data)
        monkeypatch.setattr("common.model.check_batch_norm", check)
        monkeypatch.setattr(mp, "spawn", lambda *_, **__: done)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", [script, "1", "--model", "mlp"])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert capsys.readouterr().out.endswith("\nTotal time: 2.500s\n")


# --- what is printed, by the expressions in it --------------------------------------------------

EPOCH, STEPS = "the_line_of_an_epoch", "the_lines_of_steps_and_the_sums_of_an_epoch"
START, RANK = "the_lines_of_the_start_of_a_stop_and_of_a_resume", "the_line_of_a_rank"
FIRST = "an_epochs_first_line_names_the_device_and_the_rank"
DEVICES = "data_parallel_says_over_how_many_devices_it_splits"
SUMS, LINES = "rank_0_prints_sums_that_are_right", "the_lines_of_several_nodes"
SENTENCES = "the_sentence_names_what_costs_most"
SLOW = "the_sentence_about_a_slow_rank_and_about_a_link_below_its_name"
TOTAL_TIME = "the_total_time_is_in_seconds"
# Of each function: the figures in its lines, and the test, without test_, that has them all.
FIGURES = {
    "__init__": {DEVICES: ("count", "device", "split")},
    "_run_epoch": {
        FIRST: ("name", "self.rank", "line", "epoch", "b_sz", "len(self.train_data)"),
        STEPS: ("step", "loss.item() / count"),
    },
    "_load_snapshot": {START: ("self.epoch", "self.samples_seen")},
    "train": {
        EPOCH: (
            "epoch",
            "losses",
            "accuracy",
            "train_loss",
            "test_loss",
            "correct",
            "test_size",
            "correct / test_size",
            "rate",
            "path",
        ),
        START: ("self.samples_seen",),
    },
    "check": {SUMS: ("wrong.item()", "world_size * count")},
    "report": {
        LINES: (
            "data * 1000.0",
            "compute * 1000.0",
            "slowest",
            "waiting * 1000.0",
            "exposed * 1000.0",
            "size / 1000000.0",
            "reduce * 1000.0",
            "sent / 1000000000.0",
            "step * 1000.0",
            "parts",
            "steps",
            "steps * step",
            "nodes",
            "world_size",
            "now",
            "4 * accumulate",
            "sentence",
            "kind",
            "name",
            "rate",
            "efficiency",
            "times * nodes",
        )
    },
    "verdict": {
        SENTENCES: (
            "first.alone * 1000.0",
            "cause",
            "seconds / step",
            "remedy",
            "here",
            "first.threads",
            "first.cores",
            "statistics.mean(own) / step",
        ),
        SLOW: (
            "slowest",
            "own[slowest] * 1000.0",
            "ranks[slowest].host",
            "sent / 1000000000.0",
            "first.link",
            "named / 1000000000.0",
        ),
        "threads_that_are_too_many_are_counted_on_one_node": ("max(1, first.cores // here)",),
    },
    "open_snapshot": {START: ("path",)},
    "ddp_setup": {
        RANK: (
            "rank",
            "world_size",
            "args.rank",
            "args.world_size",
            "socket.gethostname()",
            "device",
            "dist.get_backend()",
            "torch.get_num_threads()",
        )
    },
    "main": {TOTAL_TIME: ("time.perf_counter() - start",)},
    "<module>": {TOTAL_TIME: ("time.perf_counter() - start",)},
}
SCALARS = {"loss/train", "loss/test", "accuracy", "samples_per_second"}  # they are in EPOCH, too


def figures(tree: ast.AST, function: str = "<module>") -> Iterator[tuple[str, str]]:
    """Where a script makes a line that it prints, and the expressions in it."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef) else function
        if inside in FIGURES and not isinstance(node, ast.Raise):
            if isinstance(node, ast.FormattedValue):
                yield inside, ast.unparse(node.value)
            yield from figures(node, inside)
        elif not isinstance(node, ast.FunctionDef):
            yield from figures(node, inside)


@pytest.mark.parametrize("script", [*SCRIPTS, "common/check.py"])
def test_every_printed_figure_has_a_row(script):
    text = (ROOT / script).read_text()
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    scalars = {*re.findall(r'add_scalar\("(.*?)"', text)}
    assert scalars == (SCALARS if script in SCRIPTS else set())
    for function, figure in figures(ast.parse(text)):
        rows = [test for test, known in FIGURES[function].items() if figure in known]
        elsewhere = OTHER_FIGURES.get(function, ())
        assert rows or figure in elsewhere, f"{function} prints {figure}: test it, add a row"
        assert all(f"def test_{test}(" in tests for test in rows)


# Parts of errors and of names, which other tests have.
OTHER_FIGURES = {
    "open_snapshot": ("name", "then", "now"),
    "ddp_setup": ("line", "error"),
    "main": ("who", "args.init_method", "one_line(error)", "args.rank", "args.world_size"),
    "<module>": ("error",),
}
