"""What costs time and shows in no loss: how often the ranks communicate, and when."""

import itertools
import runpy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import ROOT, SCRIPTS
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

from common.data import make_digits

LOOP = "docs/your_loop.py"
PROGRAMS = [*SCRIPTS[2:], "long_run.py", LOOP]
numbers = itertools.count()
ARGUMENTS = ("--batch-size", 8, "--model", "mlp")  # of 40 samples: five steps


@pytest.fixture
def train(parse, monkeypatch, tmp_path):
    """train(program, epochs, *arguments): all of it, in this process, which is its only rank."""

    def train(program: str, epochs: int, *arguments: object) -> None:
        if program == LOOP:
            parse("single_gpu.py")  # for torchrun's environment
            text = (ROOT / LOOP).read_text().replace("first_epoch, 5", f"first_epoch, {epochs}")
            (tmp_path / "loop.py").write_text(text.replace("make_data(1000", "make_data(320"))
            runpy.run_path(str(tmp_path / "loop.py"), run_name="__main__")
        else:
            quiet = ("--log-interval", 100) if program == "long_run.py" else ()
            module, args = parse(program, epochs, 100, *ARGUMENTS, *quiet, *arguments)
            data = make_digits(40, 0), make_digits(10, 1)
            monkeypatch.setattr(module, "load_dataset", lambda *_: data)
            args.nproc_per_node, args.init_method = 1, f"file://{tmp_path}/store{next(numbers)}"
            rank = (0,) if program == "ddp_spawn.py" else ()
            getattr(module.main, "__wrapped__", module.main)(*rank, args)
        for file in tmp_path.glob("*.pt"):
            file.unlink()

    return train


@pytest.fixture
def wrapped(monkeypatch):
    """wrapped(change) calls change(ddp) for each DDP that a program makes, of small buckets."""

    def wrapped(change: Callable[[DDP], object]) -> None:
        def made(self: DDP, module: nn.Module, **options: object) -> None:
            original(self, module, bucket_cap_mb=0.0001, **options)
            change(self)

        original = DDP.__init__
        monkeypatch.setattr(DDP, "__init__", made)

    return wrapped


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_sent_while_earlier_layers_still_compute(train, wrapped, program):
    seen = []

    def send(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append("send")
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def watch(model: DDP) -> None:
        model.register_comm_hook(None, send)
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(lambda _: seen.append("first layer"))

    wrapped(watch)
    train(program, 1)
    steps = "".join(name[0] for name in seen).split("f")  # how often each is sent before
    sent = [len(step) for step in steps[1:-1]]
    assert len(sent) == 4 and min(sent) >= 2 and steps[-1] == "s"


def collectives(train: Callable, program: str, epochs: int, *arguments: object) -> Counter:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        train(program, epochs, *arguments)
    names = [event.name for event in found.events() if event.name.startswith("c10d::")]
    return Counter(name.removeprefix("c10d::").rstrip("_") for name in names)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("buffers", [0, 2])
def test_an_epoch_has_these_collectives_and_no_other(train, wrapped, monkeypatch, program, buffers):
    """The second of two epochs: DDP's, and those that docs/steps.md names."""
    models = []

    def linear(*size: int, original: type = nn.Linear, **options: object) -> nn.Module:
        layer = original(*size, **options)
        if size[-1] in (2, 10):  # the last one
            for number in range(buffers):
                layer.register_buffer(f"statistics{number}", torch.zeros(3))
        return layer

    monkeypatch.setattr(nn, "Linear", linear)
    wrapped(models.append)
    once, twice = (collectives(train, program, epochs) for epochs in (1, 2))
    found = twice - once
    buckets = len(models[-1]._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
    own = 1 if program == LOOP else 2  # the sums of training and of evaluation
    assert buckets > 1
    assert found["allreduce"] == 5 * buckets + own
    assert found["broadcast"] == (5 + buffers if buffers else 0)  # DDP sends all in one
    assert found.keys() <= {"allreduce", "broadcast"}


def test_a_micro_batch_sends_nothing_but_the_last_one_of_a_step(train, wrapped):
    wrapped(lambda model: models.append(model))
    models = []
    five, one = (
        collectives(train, "long_run.py", 1, "--accumulate", count)["allreduce"] for count in (1, 5)
    )
    buckets = len(models[0]._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
    assert five - one == 4 * buckets
