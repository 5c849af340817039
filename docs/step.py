"""Draw one training step on two ranks, from a torch.profiler trace of ddp_torchrun.py.

    torchrun --nproc_per_node=2 docs/step.py              writes docs/step.svg
    torchrun --nproc_per_node=2 docs/step.py other.svg    writes other.svg

The job trains ResNet-18 on the digits, on the CPU, and takes half a minute. Of 30 traced steps,
the picture shows the shortest of the last 15.
"""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's: without its lines for each step

import torch.distributed as dist  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import ddp_torchrun  # noqa: E402

STEPS = 30
COLORS = {
    "forward": "#00439c",
    "backward": "#00846b",
    "waiting": "#e4e8ed",
    "optimizer": "#8250a8",
    "all-reduce": "#c9400a",
    "broadcast": "#57606a",
}


def traced(step: Callable[[], object]) -> list[tuple[str, float, float]]:
    """What this rank does in a step: the kind of work, its beginning and its end in seconds."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    base = trace["baseTimeNanoseconds"] / 1e9

    def named(prefix: str) -> list[tuple[float, float]]:
        return sorted(
            (base + event["ts"] / 1e6, base + (event["ts"] + event["dur"]) / 1e6)
            for event in trace["traceEvents"]
            if event["name"].startswith(prefix) and "dur" in event
        )

    [(forward, forward_end)] = named("DistributedDataParallel.forward")
    backward = named("autograd::engine::evaluate_function")
    backward_end = max(end for _, end in backward)
    [(optimizer, optimizer_end)] = named("Optimizer.step")
    reduces = named("gloo:all_reduce")
    return [
        ("forward", forward, forward_end),
        ("backward", backward[0][0], backward_end),
        ("waiting", backward_end, max(backward_end, reduces[-1][1])),
        ("optimizer", optimizer, optimizer_end),
        *(("broadcast", *times) for times in named("gloo:broadcast")),
        *(("all-reduce", *times) for times in reduces),
    ]


def draw(ranks: list[list[tuple[str, float, float]]], path: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "step", "font.size": 10})
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained", facecolor="white")
    zero = min(begin for rank in ranks for _, begin, _ in rank)
    labels = []
    for number, rank in enumerate(ranks):
        labels += [f"rank {number}\ncomputes", f"rank {number}\nsends, receives"]
        buckets = 0
        for kind, begin, end in rank:
            row = 2.3 * number + (kind in ("broadcast", "all-reduce"))
            left, width = (begin - zero) * 1e3, (end - begin) * 1e3
            axes.barh(row, width, 0.8, left, color=COLORS[kind], edgecolor="white", linewidth=0.5)
            buckets += kind == "all-reduce"
            text = f"bucket {buckets}" if kind == "all-reduce" else kind
            color = "#1f2328" if kind == "waiting" else "white"
            if width > length(ranks) * 11 * len(text):  # the text fits
                axes.text(left + width / 2, row, text, color=color, ha="center", va="center")
    for kind, color in COLORS.items():
        axes.barh(0, 0, color=color, label=kind)
    axes.set_yticks([0, 1, 2.3, 3.3], labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=len(COLORS), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def train(path: str, trainer: ddp_torchrun.Trainer, total_epochs: int) -> int:
    """In place of `Trainer.train`."""
    sizes = trainer.train_data.batch_sampler.sizes()[:STEPS]
    steps = [
        traced(functools.partial(trainer._run_batch, source, targets, size))
        for size, (source, targets) in zip(sizes, trainer.train_data, strict=False)
    ]
    everyone = [None] * trainer.world_size
    dist.all_gather_object(everyone, steps)
    if trainer.rank == 0:
        ranks = list(zip(*everyone, strict=True))[STEPS // 2 :]
        draw(min(ranks, key=length), path)
    return 0


def length(ranks: list[list[tuple[str, float, float]]]) -> float:
    times = [time for rank in ranks for _, *both in rank for time in both]
    return max(times) - min(times)


if __name__ == "__main__":
    path = sys.argv[1] if sys.argv[1:] else str(ROOT / "docs" / "step.svg")
    sys.argv[1:] = ["--device", "cpu", "--model", "resnet18"]
    ddp_torchrun.Trainer.train = functools.partialmethod(functools.partial(train, path))
    sys.exit(ddp_torchrun.main(ddp_torchrun.parse_args()))
