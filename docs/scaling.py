"""Why is it slower with more devices? Step times predicted, and measured on the tests' nodes.

    python docs/scaling.py             write docs/scaling.md and the picture, from scaling.json
    python docs/scaling.py measure     first measure: an hour, with nothing beside it, as root, with
                                       iproute2 and `pip install '.[test,bench]'`

The sentences are in docs/scaling.md: edit them there. This writes what stands between the marks
`<!-- name -->` and `<!-- end -->`.
"""

import itertools
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from check import all_reduce_seconds  # noqa: E402

PAGE = ROOT / "docs" / "scaling.md"
DATA = PAGE.with_suffix(".json")
PICTURE = PAGE.with_suffix(".svg")


# --- the model ------------------------------------------------------------------------------------


BUCKET = 25 * 2**20  # bytes; DDP's bucket_cap_mb


class Job(NamedTuple):
    """What one device does in a step, by itself."""

    name: str
    gradient: float  # bytes
    seconds: float  # to compute
    source: str
    last: float = BUCKET  # bytes that are ready only when the backward pass has ended


class Link(NamedTuple):
    name: str
    bandwidth: float  # bytes per second that a node sends
    devices: int  # per node


# Seconds per message in NCCL's own model of itself: protocol Simple in nccl/src/graph/tuning.cc.
NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 14e-6
BACKWARD = 2 / 3  # of a step's arithmetic: gradients of the inputs and of the weights


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


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def span(low: float, high: float) -> str:
    low, high = f"{low:.0%}", f"{high:.0%}"
    return low if low == high else f"{low[:-1]} to {high}"


# --- predicted ------------------------------------------------------------------------------------

RESNET = Job("ResNet-50, batch 256, mixed precision", 25.56e6 * 4, 256 / 2470, "[1]")
# The first layer and the last share their weights, 50,257 x 768: one gradient, ready at the end.
GPT2 = Job(
    "GPT-2 of 124M, 12 x 1,024 tokens, bf16",
    124.4e6 * 4,
    12 * 1024 / 106_700,
    "[2]",
    last=50_257 * 768 * 4,
)
LINKS = [
    *(Link(f"{gigabits} Gbit/s", gigabits * 1e9 / 8, 8) for gigabits in (1, 10, 25, 100, 400)),
    Link("NVLink (A100), one node", 300e9, 8),
]
COUNTS = (2, 8, 16, 64, 256, 1024)


def inputs() -> list[str]:
    rows = ["| one device | a step's computing | gradient | of it ready last | source |"]
    rows.append("| --- |" + " --- |" * 4)
    for job in (RESNET, GPT2):
        sizes = [f"{size / 1e6:.0f} MB" for size in (job.gradient, job.last)]
        cells = (job.name, f"{job.seconds * 1e3:.1f} ms", *sizes, job.source)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def placed(link: Link, devices: int) -> Link:
    """Each device is a node of its own, until there are more than eight."""
    return link._replace(devices=1 if devices <= 8 else 8)


def predicted(job: Job) -> list[str]:
    rows = [
        f"| {job.name} | " + " | ".join(f"{count:,}" for count in COUNTS) + " |",
        "| --- |" + " --- |" * len(COUNTS),
    ]
    for link in LINKS:
        one_node = link.name.startswith("NVLink")
        cells = []
        for count in COUNTS:
            if one_node:
                cells.append(span(*efficiencies(job, count, link)) if count <= 8 else "")
            else:
                cells.append(span(*efficiencies(job, count, placed(link, count))))
        rows.append(f"| {link.name} | " + " | ".join(cells) + " |")
    return rows


def remedies() -> list[str]:
    rows = ["| 64 devices, 8 per node | as it is | bf16 gradients | `--accumulate 8` | both |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for job in (RESNET, GPT2):
        for link in LINKS[1:4]:
            options = [(1, False), (1, True), (8, False), (8, True)]
            cells = [span(*efficiencies(job, 64, link, *option)) for option in options]
            rows.append(f"| {job.name.split(',')[0]}, {link.name} | " + " | ".join(cells) + " |")
    return rows


def strong() -> list[str]:
    """One global batch of 8,192 images, shared among more and more devices, nothing hidden."""
    counts = [2**power for power in range(11)]
    rows = ["| link | 8 devices | 64 | 256 | 1,024 | worth doubling up to |"]
    rows.append("| --- |" + " --- |" * 5)
    for link in LINKS[:-1]:
        times = []
        for count in counts:
            part = RESNET._replace(seconds=8192 / 2470 / count)
            alone = count == 1
            times.append(
                part.seconds if alone else step_seconds(part, count, placed(link, count))[0]
            )
        faster = {count: times[0] / time for count, time in zip(counts, times, strict=True)}
        pays = [count for count in counts[1:] if faster[count] >= 1.5 * faster[count // 2]]
        cells = [f"{digits(faster[count])} times" for count in (8, 64, 256, 1024)]
        rows.append(f"| {link.name} | {' | '.join(cells)} | {max(pays, default=1):,} |")
    return rows


# --- published ------------------------------------------------------------------------------------

PUBLISHED = [  # a job, its link, devices, and the efficiency that was published, with its source
    (Job("Inception V3", 23.8e6 * 4, 64 / 142, "[3]"), Link("25 Gbit/s", 25e9 / 8, 4), 512, 0.90),
    (
        Job("ResNet-101, from 16 devices", 44.5e6 * 4, 64 * 16 / 1656.82, "[3]"),
        Link("25 Gbit/s", 25e9 / 8, 4),
        512,
        0.90,
    ),
    (Job("VGG-16", 138.4e6 * 4, 64 / 154, "[3]"), Link("25 Gbit/s", 25e9 / 8, 4), 512, 0.68),
    (Job("ResNet-50, TF32", 25.56e6 * 4, 256 / 938, "[1]"), LINKS[-1], 8, 7248 / 938 / 8),
    (
        Job("ResNet-50, mixed precision", 25.56e6 * 4, 256 / 2470, "[1]"),
        LINKS[-1],
        8,
        16621 / 2470 / 8,
    ),
]


def published() -> list[str]:
    rows = [
        "| | devices | link | predicted | published | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for job, link, devices, share in PUBLISHED:
        low, high = efficiencies(job, devices, link)
        cells = (job.name, str(devices), link.name, span(low, high), f"{share:.0%}", job.source)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


# --- measured -------------------------------------------------------------------------------------

NODES = (1, 2, 3, 4, 6, 8)
CASES = [  # model, samples per pass and node, link, steps per epoch: on one node, on several
    ("mlp", 8, "100mbit", 2000, 20),
    ("mlp", 8, "1gbit", 2000, 60),
    ("resnet18", 2, "100mbit", 40, 4),
    ("resnet18", 2, "1gbit", 40, 10),
]


def measure() -> dict:
    """Train on the tests' nodes, and on two of them run benchmarks/check.py, too."""
    sys.path.insert(0, str(ROOT / "tests"))
    import platform
    import tempfile

    import torch
    from helpers.files import idx_files
    from helpers.hosts import Hosts
    from helpers.jobs import Job, command
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = []

    def start(hosts: Hosts, folder: Path, count: int, *words: object) -> list[Job]:
        jobs = []
        for rank in range(count):
            own = folder / f"node{rank}"
            own.mkdir(exist_ok=True)
            env = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            env |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": 22225, "GLOO_SOCKET_IFNAME": ""}
            env = {name: str(value) for name, value in env.items()}
            jobs.append(Job(command(*words), own, env, fork=True, host=hosts.name(rank)))
        return jobs

    for model, batch_size, link, alone, several in CASES:
        for accumulate in (1, 8):
            for count in NODES:
                samples = (alone if count == 1 else several * count) * batch_size * accumulate
                with tempfile.TemporaryDirectory() as name, Hosts(count) as hosts:
                    hosts.shape(link)
                    folder = Path(name)
                    data = idx_files(folder / "data", samples, 10)
                    options = (4, 100, "--dataset", "fashion-mnist", "--data-dir", data)
                    options += ("--model", model, "--batch-size", batch_size)
                    options += ("--accumulate", accumulate)
                    script = "ddp_torchrun.py"
                    jobs = start(hosts, folder, count, script, *options, "--log-dir", "log")
                    jobs[0].wait_for("^Epoch 0 ", seconds=900)
                    before = processor_time()
                    jobs[0].wait_for("^Epoch 3 ", seconds=900)
                    busy, total = (a - b for a, b in zip(processor_time(), before, strict=True))
                    for job in jobs:
                        job.finish(seconds=900)
                    run = {"model": model, "link": link, "accumulate": accumulate, "nodes": count}
                    run["busy"] = round(busy / total, 3)
                    events = EventAccumulator(str(folder / "node0" / "log")).Reload()
                    ends = [scalar.wall_time for scalar in events.Scalars("loss/train")]
                    seconds = [after - before for before, after in itertools.pairwise(ends)]
                    run["rates"] = [round(samples / each, 2) for each in seconds]
                    if count == 2:
                        check = ("benchmarks/check.py", ROOT / script)
                        jobs = start(hosts, folder, count, *check, *options)
                        text, _ = (job.finish(seconds=900) for job in jobs)
                        run["check"] = text[text.index("All-reduce | ") :].splitlines()[:-1]
                    runs.append(run)
                    print(run, flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    return {"machine": machine, "torch": torch.__version__, "runs": runs, "samplers": samplers()}


def processor_time() -> tuple[int, int]:
    """Of all cores since the machine's start: busy, and all of it, in the kernel's ticks."""
    ticks = list(map(int, Path("/proc/stat").read_text().split()[1:9]))
    idle, disk, stolen = ticks[3], ticks[4], ticks[7]  # the last is what other machines got
    return sum(ticks) - idle - disk - stolen, sum(ticks)


SAMPLES = 100_000_000


def samplers() -> list[dict]:
    """What a sampler costs one rank of many; each in a process of its own, for its memory."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for ranks in (8, 1024):
        for ours in (False, True):
            with ProcessPoolExecutor(1, context) as process:
                rows.append(process.submit(sample, ours, ranks).result())
            print(rows[-1], flush=True)
    return rows


def sample(ours: bool, ranks: int) -> dict:
    """An epoch of batches of 32, in seconds and bytes."""
    import resource

    from torch.utils.data import BatchSampler, DistributedSampler

    from common.data import GlobalBatchSampler

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    batches = GlobalBatchSampler(range(SAMPLES), 32, world_size=ranks)
    if not ours:
        theirs = DistributedSampler(range(SAMPLES), num_replicas=ranks, rank=0)
        batches = BatchSampler(theirs, 32, drop_last=False)
    before = held()
    start = time.perf_counter()
    steps = iter(batches)
    next(steps)
    first = time.perf_counter() - start
    start = time.perf_counter()
    for _ in itertools.islice(steps, 2000):  # not to its end, where the memory is given back
        pass
    each = (time.perf_counter() - start) / 2000
    figures = {"first": first, "step": each, "peak": peak() - before, "held": held() - before}
    return {"ours": ours, "ranks": ranks, **figures}


def printed(check: list[str], pattern: str) -> float:
    """A number that benchmarks/check.py printed."""
    return float(re.search(pattern + r" ([\d.]+)", "\n".join(check))[1])


def foreseen(check: list[str], nodes: int, samples: int) -> list[float]:
    """Samples per second of 4 or 8 nodes, by benchmarks/check.py on two of them.

    First with cores of their own, as it has it; then with two cores for all. On two nodes each
    had one of these; now nodes / 2 of them compute on each, one after the other.
    """
    rate = printed(check, rf"Predicted \| {nodes} nodes \|")
    turns = (nodes / 2 - 1) * printed(check, "compute") / 1e3
    return [rate, samples * nodes / (samples * nodes / rate + turns)]


def accumulated(check: list[str], samples: int) -> float:
    """Samples per second of two nodes with --accumulate 8, by benchmarks/check.py without it."""
    step = printed(check, r"Step \|") - printed(check, "all-reduce")
    return 2 * 8 * samples / (8 * step + printed(check, "all-reduce")) * 1e3


def by_case(result: dict) -> dict:
    """{(model, link, accumulate): {nodes: its run}}"""
    runs = {}
    for run in result["runs"]:
        key = (run["model"], run["link"], run["accumulate"])
        runs.setdefault(key, {})[run["nodes"]] = run | {"rate": statistics.median(run["rates"])}
    return runs


PER_PASS = {model: samples for model, samples, *_ in CASES}
NAMES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def measured(result: dict) -> list[str]:
    """What ran."""
    rows = ["| samples per second on | 1 node | " + " | ".join(map(str, NODES[1:])) + " | busy |"]
    rows.append("| --- |" + " --- |" * (len(NODES) + 1))
    everything = []
    for (model, link, accumulate), runs in by_case(result).items():
        everything += runs.values()
        cells = [f"{model}, {NAMES[link]}, `--accumulate {accumulate}`"]
        cells += [digits(runs[nodes]["rate"]) for nodes in NODES] + [f"{runs[8]['busy']:.0%}"]
        rows.append(f"| {' | '.join(cells)} |")

    def off(runs: list[dict]) -> float:
        return max(abs(rate / run["rate"] - 1) for run in runs for rate in run["rates"])

    one = off([run for run in everything if run["nodes"] == 1])
    more = off([run for run in everything if run["nodes"] > 1])
    where = f"{result['machine']}, torch {result['torch']}, gloo"
    spread = f"Each epoch is within {more:.0%} of its run's median, on one node within {one:.0%}."
    return [*rows, "", f"({where}. {spread})"]


def compared(result: dict) -> list[str]:
    """What benchmarks/check.py on two nodes had said of four and of eight, and the error."""
    rows = ["| `check.py` on 2 nodes: | 4 nodes | 8 nodes | 4, cores counted | 8, cores counted |"]
    rows.append("| --- |" + " --- |" * 4)
    for (model, link, accumulate), runs in by_case(result).items():
        cells = [f"{model}, {NAMES[link]}, `--accumulate {accumulate}`"]
        samples = PER_PASS[model] * accumulate
        foretold = [foreseen(runs[2]["check"], nodes, samples) for nodes in (4, 8)]
        for rates in zip(*foretold, strict=True):
            for rate, nodes in zip(rates, (4, 8), strict=True):
                cells.append(f"{digits(rate)} ({rate / runs[nodes]['rate'] - 1:+.0%})")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def frugal(result: dict) -> list[str]:
    """What benchmarks/check.py without --accumulate had said of it, on the same two nodes."""
    rows = ["| 2 nodes, `--accumulate 8` | predicted | measured |", "| --- | --- | --- |"]
    runs = by_case(result)
    for model, link, accumulate in runs:
        if accumulate == 1:
            rate = accumulated(runs[model, link, 1][2]["check"], PER_PASS[model])
            truth = runs[model, link, 8][2]["rate"]
            error = f"{digits(rate)} ({rate / truth - 1:+.0%})"
            rows.append(f"| {model}, {NAMES[link]} | {error} | {digits(truth)} |")
    return rows


def sampled(result: dict) -> list[str]:
    rows = ["| ranks | sampler | first batch | each step | peak memory | during the epoch |"]
    rows.append("| --- |" + " --- |" * 5)
    for row in result["samplers"]:
        name = "`GlobalBatchSampler`" if row["ours"] else "`DistributedSampler`"
        cells = [f"{row['ranks']:,}", name, f"{row['first']:.1f} s", f"{row['step'] * 1e6:.1f} µs"]
        cells += [f"{row[name] / 1e9:.2f} GB" for name in ("peak", "held")]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


# --- the page -------------------------------------------------------------------------------------


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scaling"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    counts = [2**power for power in range(1, 11)]
    for link in reversed(LINKS[:-1]):
        shares = [efficiencies(RESNET, count, placed(link, count)) for count in counts]
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
    parts = {
        "measured": measured(result),
        "compared": compared(result),
        "frugal": frugal(result),
        "samplers": sampled(result),
        "inputs": inputs(),
        "resnet": predicted(RESNET),
        "gpt2": predicted(GPT2),
        "remedies": remedies(),
        "strong": strong(),
        "published": published(),
    }
    for name, lines in parts.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = "\n".join(lines) + "\n"
        page, count = re.subn(pattern, lambda m, text=text: m[1] + text + m[2], page, flags=re.S)
        assert count == 1, f"{count} times <!-- {name} -->"
    return page


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        DATA.write_text(json.dumps(measure(), indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), json.loads(DATA.read_text())))
    plot(PICTURE)
