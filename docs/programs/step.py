"""Draw one training step on two ranks, from a torch.profiler trace of ddp_torchrun.py.

    torchrun --nproc_per_node=2 docs/programs/step.py [FILE]    writes FILE, or docs/step.svg

The job trains ResNet-18 on the digits, on the CPU, and takes half a minute. Of 30 traced steps,
the picture shows the shortest of the last 15.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's: without its lines for each step

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import ddp_torchrun  # noqa: E402
from common.data import make_digits  # noqa: E402
from common.model import resnet18  # noqa: E402

STEPS = 30
COLORS = {
    "forward": "#00439c",
    "backward": "#00846b",
    "waiting": "#8c959f",
    "optimizer": "#8250a8",
    "all-reduce": "#c9400a",
}


def traced(step: Callable[[], object]) -> list[tuple[str, float, float]]:
    """What this rank does in a step: the kind of work, its beginning and its end, in ms."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    base = profiler.profiler.kineto_results.trace_start_ns() / 1e6

    def named(prefix: str) -> list[tuple[float, float]]:
        times = [event.time_range for event in profiler.events() if event.name.startswith(prefix)]
        return sorted((base + time.start / 1e3, base + time.end / 1e3) for time in times)

    backward = named("autograd::engine::evaluate_function")
    backward_end = max(end for _, end in backward)
    reduces = named("gloo:all_reduce")
    return [
        ("forward", *named("DistributedDataParallel.forward")[0]),
        ("backward", backward[0][0], backward_end),
        ("waiting", backward_end, max(backward_end, reduces[-1][1])),
        ("optimizer", *named("Optimizer.step")[0]),
        *(("all-reduce", *times) for times in reduces),
    ]


def draw(ranks: list[list[tuple[str, float, float]]], path: str) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("svg")
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "step", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained", facecolor="white")
    zero = min(begin for rank in ranks for _, begin, _ in rank)
    for number, rank in enumerate(ranks):
        buckets = 0
        for kind, begin, end in rank:
            row = 2.3 * number + (kind == "all-reduce")
            axes.barh(row, end - begin, 0.8, begin - zero, color=COLORS[kind], edgecolor="white")
            buckets += kind == "all-reduce"
            text = f"bucket {buckets}" if kind == "all-reduce" else kind
            if end - begin > length(ranks) * 0.015 * len(text):  # the text fits
                middle = (begin + end) / 2 - zero
                axes.text(middle, row, text, color="white", ha="center", va="center")
            elif kind == "all-reduce":
                axes.text(end - zero, row, f" {text}", va="center")
    for kind, color in COLORS.items():
        axes.barh(0, 0, color=color, label=kind)
    labels = [f"rank {n}\n{does}" for n in (0, 1) for does in ("computes", "sends, receives")]
    axes.set_yticks([0, 1, 2.3, 3.3], labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(COLORS), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def trace(args: argparse.Namespace, path: str) -> None:
    device = ddp_torchrun.ddp_setup(args)
    dataset = make_digits(32 * STEPS, dist.get_rank())
    model = DDP(resnet18(channels=1))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    steps = []
    for first in range(0, len(dataset), 32):
        batches = dataset.__getitems__(range(first, first + 32))  # one of 32, as from a loader
        given = (model, batches, optimizer, device)
        steps.append(traced(functools.partial(ddp_torchrun.train_epoch, *given)))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, steps)
    if dist.get_rank() == 0:
        draw(min([*zip(*everyone, strict=True)][STEPS // 2 :], key=length), path)
    del model
    dist.destroy_process_group()


def length(ranks: list[list[tuple[str, float, float]]]) -> float:
    times = [time for rank in ranks for _, *both in rank for time in both]
    return max(times) - min(times)


if __name__ == "__main__":
    path = sys.argv[1] if sys.argv[1:] else str(ROOT / "docs" / "step.svg")
    sys.argv[1:] = ["--device", "cpu"]
    trace(ddp_torchrun.parse_args(), path)
