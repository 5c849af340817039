"""What costs time and shows in no loss: how often the ranks communicate, and when."""

import re
import runpy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import LONG, ROOT, SCRIPTS
from torch import nn
from torch._dynamo.backends import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

LOOP = "docs/your_loop.py"
PROGRAMS = [*SCRIPTS[2:], LONG, LOOP]


@pytest.fixture
def train(do, parse, tmp_path):
    """train(program, epochs, *arguments): all of it, in this process, which is its only rank. An
    epoch has five steps."""

    def train(program: str, epochs: int, *arguments: object) -> None:
        if program == LOOP:
            parse("single_gpu.py")  # for torchrun's environment
            text = (ROOT / LOOP).read_text().replace("first_epoch, 5", f"first_epoch, {epochs}")
            (tmp_path / "loop.py").write_text(text.replace("make_data(1000", "make_data(320"))
            runpy.run_path(str(tmp_path / "loop.py"), run_name="__main__")
        else:
            quiet = ("--log-interval", 100) if program == LONG else ()
            words = ("--model", "mlp", "--batch-size", 8, *quiet, *arguments)
            train.job = do(program, epochs, 100, *words)
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
    models = []
    wrapped(models.append)
    five, one = (
        collectives(train, LONG, 1, "--accumulate", count)["allreduce"] for count in (1, 5)
    )
    buckets = len(models[0]._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
    assert five - one == 4 * buckets


@pytest.mark.parametrize("program", [*SCRIPTS, LONG, LOOP])
def test_the_host_never_waits_for_the_device_between_two_steps(train, monkeypatch, program):
    """Neither for item() nor for an if on a tensor, of which both copy a number to the host."""
    seen, step = [], torch.optim.SGD.step

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, called, types, args=(), kwargs=None):
            seen.append("wait" if called is torch.ops.aten._local_scalar_dense.default else "")
            return called(*args, **(kwargs or {}))

    monkeypatch.setattr(torch.optim.SGD, "step", lambda *given: step(*given) or seen.append("step"))
    with Watch():
        train(program, 2)
    assert re.fullmatch("(wait)*(step){5}(wait)+(step){5}(wait)+", "".join(seen)), seen


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        *((name, (), {True}) for name in PROGRAMS[:-1]),
        (LOOP, (), {False}),
        (LONG, ("--accumulate", 5), {False, True}),  # before the last micro-batch, and after it
    ],
)
def test_gradients_lie_in_the_buckets(train, wrapped, monkeypatch, program, arguments, expected):
    """With a bucket view, but not those that accumulate."""
    buckets, found, step = set(), [], torch.optim.SGD.step

    def send(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.add(bucket.buffer().untyped_storage().data_ptr())
        return allreduce_hook(None, bucket)

    def look(weights: list[nn.Parameter]) -> None:
        own = {w.grad.untyped_storage().data_ptr() for w in weights if w.grad is not None}
        found.extend([own <= buckets] if own else [])

    def watch(model: DDP) -> None:
        model.register_comm_hook(None, send)
        model.register_forward_pre_hook(lambda model, _: look([*model.parameters()]))

    def stepping(optimizer: torch.optim.Optimizer, *given: object) -> object:
        look(optimizer.param_groups[0]["params"])
        return step(optimizer, *given)

    wrapped(watch)
    monkeypatch.setattr(torch.optim.SGD, "step", stepping)
    train(program, 2, *arguments)
    assert {*found} == expected


@pytest.mark.slow("compiles")
def test_a_compiled_graph_is_split_where_buckets_end(train, wrapped, monkeypatch):
    """With one part, no gradient would be sent before the backward pass has ended. The losses are
    as without it."""
    parts, split, compile = [], distributed.DDPOptimizer.compile_fn, nn.Module.compile

    def look(self: object, graph: torch.fx.GraphModule, inputs: list) -> object:
        result = split(self, graph, inputs)
        parts.append(len(self.buckets))
        return result

    eager = lambda self, **options: compile(self, backend="aot_eager", **options)  # noqa: E731
    monkeypatch.setattr(nn.Module, "compile", eager)
    monkeypatch.setattr(distributed.DDPOptimizer, "compile_fn", look)
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 100)  # of the compiler's own
    wrapped(lambda model: None)
    texts = []
    for options in ((), ("--compile",)):
        train(LONG, 1, "--log-interval", 1, *options)
        texts.append(re.findall("Loss: .*", train.job.text))
    assert texts[0] == texts[1] and len(texts[0]) == 5
    assert parts and min(parts) > 1
