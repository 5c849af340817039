"""Why is it slower with more devices? Step times predicted, and measured on the tests' nodes.

    python docs/scaling.py             write the tables and the picture of docs/scaling.md
    python docs/scaling.py measure     first measure: with nothing beside it, as root, with
                                       iproute2 and `pip install '.[test,bench]'`

It writes what stands between the marks `<!-- name -->` and `<!-- end -->`, from scaling.json.
"""

import itertools
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import torch  # noqa: E402
from check import all_reduce_seconds  # noqa: E402
from report import fill  # noqa: E402

PAGE = ROOT / "docs" / "scaling.md"
DATA = PAGE.with_suffix(".json")
PICTURE = PAGE.with_suffix(".svg")

BUCKET = 25 * 2**20  # bytes; DDP's bucket_cap_mb
BACKWARD = 2 / 3  # of a step's arithmetic: gradients of the inputs and of the weights
# Seconds per message in NCCL's own model of itself: protocol Simple in nccl/src/graph/tuning.cc.
NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 14e-6


class Job(NamedTuple):
    """What one device does in a step, by itself."""

    name: str
    gradient: float  # bytes
    seconds: float  # to compute
    last: float = BUCKET  # bytes that are ready only when the backward pass has ended


class Link(NamedTuple):
    name: str
    bandwidth: float  # bytes per second that a node sends
    devices: int  # per node


def reduce_seconds(devices: int, size: float, link: Link, buckets: int = 1) -> float:
    """An all-reduce of `size` bytes: a ring of all devices, which leaves each node once.

    NCCL takes a tree where a ring's many messages would take longer: the same bytes, and messages
    only up and down its levels. Each bucket is an all-reduce of its own, with its own messages.
    """
    nodes = math.ceil(devices / link.devices)
    latency = NETWORK_LATENCY if nodes > 1 else NVLINK_LATENCY
    ring = all_reduce_seconds(devices, size, buckets * latency, link.bandwidth)
    hops = 2 * (min(devices, link.devices) - 1) * NVLINK_LATENCY
    hops += 2 * math.ceil(math.log2(nodes)) * NETWORK_LATENCY
    tree = buckets * hops + all_reduce_seconds(devices, size, 0, link.bandwidth)
    return min(ring, tree)


def step_seconds(
    job: Job, devices: int, link: Link, accumulate: int = 1, bf16: bool = False
) -> tuple[float, float]:
    """A step's time if nothing of the all-reduce is hidden, and if all is hidden that can be.

    The all-reduce may begin with the first bucket of gradients, and what is ready last has nothing
    to hide behind. With accumulation only the last backward pass hides it.
    """
    buckets = math.ceil(job.gradient / BUCKET)
    size = job.gradient / (2 if bf16 else 1)
    reduce = reduce_seconds(devices, size, link, buckets)
    compute = accumulate * job.seconds
    last = reduce * min(1.0, job.last / job.gradient)
    hidden = min(reduce - last, BACKWARD * job.seconds)
    return compute + reduce, compute + reduce - hidden


def efficiencies(job: Job, devices: int, link: Link, accumulate: int = 1, bf16: bool = False):
    """The share of a step that is computing: at least, at most."""
    compute = accumulate * job.seconds
    return [compute / seconds for seconds in step_seconds(job, devices, link, accumulate, bf16)]


# --- predicted ------------------------------------------------------------------------------------

JOBS = (
    Job("ResNet-50", 25.56e6 * 4, 256 / 2470),
    # Its first layer and its last share 50,257 x 768 weights: one gradient, ready at the end.
    Job("GPT-2", 124.4e6 * 4, 12 * 1024 / 106_700, last=50_257 * 768 * 4),
)
LINKS = [Link(f"{gigabits} Gbit/s", gigabits * 1e9 / 8, 8) for gigabits in (1, 10, 25, 100, 400)]
NVLINK = Link("NVLink", 300e9, 8)
PUBLISHED = [  # a job, its link, devices, and the efficiency that was published; docs/scaling.md
    (Job("Inception V3", 23.8e6 * 4, 64 / 142), Link("25 Gbit/s", 25e9 / 8, 4), 512, 0.90),
    (Job("ResNet-101", 44.5e6 * 4, 64 * 16 / 1656.82), Link("25 Gbit/s", 25e9 / 8, 4), 512, 0.90),
    (Job("VGG-16", 138.4e6 * 4, 64 / 154), Link("25 Gbit/s", 25e9 / 8, 4), 512, 0.68),
    (Job("ResNet-50, TF32", 25.56e6 * 4, 256 / 938), NVLINK, 8, 7248 / 938 / 8),
    (Job("ResNet-50, mixed", 25.56e6 * 4, 256 / 2470), NVLINK, 8, 16621 / 2470 / 8),
]


def placed(link: Link, devices: int) -> Link:
    """Each device is a node of its own, until there are more than eight."""
    return link._replace(devices=1 if devices <= 8 else 8)


def span(low: float, high: float) -> str:
    low, high = f"{low:.0%}", f"{high:.0%}"
    return low if low == high else f"{low[:-1]} to {high}"


def predicted() -> list[str]:
    rows = ["| | 2 devices | 8 | 64 | 1,024 | 64, `--accumulate 8` | 64, bf16 gradients |"]
    rows.append("| --- |" + " ---: |" * 6)
    for job in JOBS:
        for link in LINKS[1:]:
            options = [(2,), (8,), (64,), (1024,), (64, 8), (64, 1, True)]
            cells = [f"{job.name}, {link.name}"]
            for count, *changed in options:
                cells.append(span(*efficiencies(job, count, placed(link, count), *changed)))
            rows.append(f"| {' | '.join(cells)} |")
    return rows


# --- measured -------------------------------------------------------------------------------------

NODES = (1, 2, 4, 8)
SAMPLES = {"mlp": 8, "resnet18": 2}  # per pass and node
CASES = [  # model, link, --accumulate, steps per epoch: on one node, on several
    ("mlp", "100mbit", 1, 2000, 20),
    ("mlp", "100mbit", 8, 2000, 20),
    ("mlp", "1gbit", 1, 2000, 60),
    ("resnet18", "100mbit", 1, 40, 4),
    ("resnet18", "100mbit", 8, 40, 4),
    ("resnet18", "1gbit", 1, 40, 10),
]
NAMES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def measure() -> dict:
    """Train on the tests' nodes, and on two of them run benchmarks/check.py, too."""
    runs = []
    for (model, link, accumulate, alone, several), nodes in itertools.product(CASES, NODES):
        steps = alone if nodes == 1 else several * nodes
        samples = steps * SAMPLES[model] * accumulate
        options = ("--model", model, "--batch-size", SAMPLES[model], "--accumulate", accumulate)
        run = {"model": model, "link": link, "accumulate": accumulate, "nodes": nodes}
        runs.append(run | measured_run(nodes, link, samples, options))
        print(runs[-1], flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    return {"machine": machine, "torch": torch.__version__, "runs": runs}


def measured_run(nodes: int, link: str, samples: int, options: tuple) -> dict:
    """Three epochs of ddp_torchrun.py after a first one, each with evaluation on ten samples."""
    from helpers.files import idx_files
    from helpers.hosts import Hosts
    from helpers.jobs import Job, command

    with tempfile.TemporaryDirectory() as name, Hosts(nodes) as hosts:
        hosts.shape(link)
        folder = Path(name)
        data = idx_files(folder / "data", samples, 10)
        options = (4, 100, "--dataset", "fashion-mnist", "--data-dir", data, *options)

        def start(*words: object) -> list[Job]:
            jobs = []
            for rank in range(nodes):
                own = folder / f"node{rank}"
                own.mkdir(exist_ok=True)
                there = hosts.command(rank, command(*words, *options), hosts.exported(rank))
                jobs.append(Job(there, own, {}))
            return jobs

        jobs, ends = start("ddp_torchrun.py"), []
        for epoch in range(4):
            jobs[0].wait_for(rf"^Epoch {epoch} \| Train loss: ", seconds=900)
            ends.append((time.monotonic(), *processor_time()))
        for job in jobs:
            job.finish(seconds=900)
        _, busy, total = (last - first for first, last in zip(ends[0], ends[3], strict=True))
        seconds = [after[0] - before[0] for before, after in itertools.pairwise(ends)]
        run = {"busy": round(busy / total, 3), "rates": [round(samples / s, 2) for s in seconds]}
        if nodes == 2:
            text, _ = (
                job.finish(seconds=900)
                for job in start("benchmarks/check.py", ROOT / "ddp_torchrun.py")
            )
            run["check"] = text[text.index("All-reduce | ") :].splitlines()
        return run


def processor_time() -> tuple[int, int]:
    """Of all cores since the machine's start: busy, and all of it, in the kernel's ticks."""
    ticks = list(map(int, Path("/proc/stat").read_text().split()[1:9]))
    idle, disk, stolen = ticks[3], ticks[4], ticks[7]  # the last is what other machines got
    return sum(ticks) - idle - disk - stolen, sum(ticks)


def printed(check: list[str], pattern: str) -> float:
    """A number that benchmarks/check.py printed."""
    return float(re.search(pattern + r" ([\d.]+)", "\n".join(check))[1])


def by_case(result: dict) -> dict:
    """{(model, link, accumulate): {nodes: its run}}"""
    runs = {}
    for run in result["runs"]:
        key = (run["model"], run["link"], run["accumulate"])
        runs.setdefault(key, {})[run["nodes"]] = run | {"rate": statistics.median(run["rates"])}
    return runs


def foretold(cases: dict, model: str, link: str, accumulate: int) -> dict[int, float]:
    """What benchmarks/check.py on two nodes had said, by the number of nodes.

    Of --accumulate 8 on the same two nodes it said so without the option.
    """
    check = cases[model, link, accumulate][2]["check"]
    rates = {nodes: printed(check, rf"Predicted \| {nodes} nodes \|") for nodes in (4, 8)}
    if accumulate > 1:
        check = cases[model, link, 1][2]["check"]
        reduce = printed(check, "all-reduce")
        step = 8 * (printed(check, r"Step \|") - reduce) + reduce  # in ms
        rates[2] = 2 * 8 * SAMPLES[model] / step * 1e3
    return rates


def measured(result: dict) -> list[str]:
    where = f"{result['machine']}, torch {result['torch']}, gloo"
    lines = [f"| samples per second ({where}) | 1 node | 2 | 4 | 8 | busy cores |"]
    lines.append("| --- |" + " ---: |" * 5)
    cases = by_case(result)
    for (model, link, accumulate), runs in cases.items():
        cells = [f"{model}, {NAMES[link]}, `--accumulate {accumulate}`"]
        said = foretold(cases, model, link, accumulate)
        for nodes in NODES:
            rate = runs[nodes]["rate"]
            cell = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
            cells.append(cell + (f" ({said[nodes] / rate - 1:+.0%})" if nodes in said else ""))
        lines.append(f"| {' | '.join(cells)} | {runs[8]['busy']:.0%} |")
    return lines


# --- the page -------------------------------------------------------------------------------------


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scaling"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    counts = [2**power for power in range(1, 11)]
    for link in reversed(LINKS):
        shares = [efficiencies(JOBS[0], count, placed(link, count)) for count in counts]
        left.fill_between(counts, *zip(*shares, strict=True), alpha=0.4, label=link.name)
    left.set_title("Predicted: ResNet-50 on A100s")
    for job, link, devices, share in PUBLISHED[:3]:
        shares = [efficiencies(job, count, link) for count in counts[2:]]
        band = right.fill_between(counts[2:], *zip(*shares, strict=True), alpha=0.4, label=job.name)
        right.plot(devices, share, "o", color=band.get_facecolor()[0][:3])
    right.set_title("P100s, 25 Gbit/s: predicted, and published (dots)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts[::3], [f"{count:,}" for count in counts[::3]])
        axes.set_xlabel("devices")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.legend(loc="lower left", fontsize="small")
    left.set_ylabel("efficiency")
    figure.savefig(path, metadata={"Date": None})


def written(page: str, result: dict) -> str:
    """The page with what this program knows between its marks."""
    return fill(page, {"measured": measured(result), "predicted": predicted()})


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        DATA.write_text(json.dumps(measure(), indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), json.loads(DATA.read_text())))
    plot(PICTURE)
