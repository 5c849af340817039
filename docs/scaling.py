"""Why is it slower with more devices? Step times predicted, and measured on the tests' nodes.

    python docs/scaling.py             write docs/scaling.md and the picture, from scaling.json
    python docs/scaling.py measure     first measure: half an hour, with nothing beside it, as root,
                                       with iproute2 and `pip install '.[test,bench]'`

The sentences are in docs/scaling.md: edit them there. This writes what stands between the marks
`<!-- name -->` and `<!-- end -->`.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.check import all_reduce_seconds  # noqa: E402

PAGE = ROOT / "docs" / "scaling.md"
DATA = PAGE.with_suffix(".json")
PICTURE = PAGE.with_suffix(".svg")


# --- the model ------------------------------------------------------------------------------------


class Job(NamedTuple):
    """What one device does in a step, by itself."""

    name: str
    gradient: float  # bytes
    seconds: float  # to compute
    source: str


class Link(NamedTuple):
    name: str
    bandwidth: float  # bytes per second that a node sends
    devices: int  # per node


# Seconds per message in NCCL's own model of itself: protocol Simple in nccl/src/graph/tuning.cc.
NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 14e-6
BACKWARD = 2 / 3  # of a step's arithmetic: gradients of the inputs and of the weights
BUCKET = 25 * 2**20  # bytes; DDP's bucket_cap_mb


def reduce_seconds(devices: int, size: float, link: Link) -> float:
    """An all-reduce of `size` bytes: a ring of all devices, which leaves each node once.

    NCCL takes a tree where a ring's many messages would take longer: the same bytes, and messages
    only up and down its levels.
    """
    nodes = math.ceil(devices / link.devices)
    latency = NETWORK_LATENCY if nodes > 1 else NVLINK_LATENCY
    ring = all_reduce_seconds(devices, size, latency, link.bandwidth)
    hops = 2 * (min(devices, link.devices) - 1) * NVLINK_LATENCY
    hops += 2 * math.ceil(math.log2(nodes)) * NETWORK_LATENCY
    tree = hops + all_reduce_seconds(devices, size, 0, link.bandwidth)
    return min(ring, tree)


def step_seconds(
    job: Job, devices: int, link: Link, accumulate: int = 1, bf16: bool = False
) -> tuple[float, float]:
    """A step's time if nothing of the all-reduce is hidden, and if all is hidden that can be.

    The all-reduce may begin with the first bucket of gradients, and the last bucket has nothing to
    hide behind. With accumulation only the last backward pass hides it.
    """
    size = job.gradient / (2 if bf16 else 1)
    reduce = reduce_seconds(devices, size, link)
    compute = accumulate * job.seconds
    last = reduce * min(1.0, BUCKET / job.gradient)
    hidden = min(reduce - last, BACKWARD * job.seconds)
    return compute + reduce, compute + reduce - hidden


def efficiencies(job: Job, devices: int, link: Link, accumulate: int = 1, bf16: bool = False):
    """The share of a step that is computing: at least, at most."""
    compute = accumulate * job.seconds
    return [compute / seconds for seconds in step_seconds(job, devices, link, accumulate, bf16)]


def span(low: float, high: float) -> str:
    low, high = f"{low:.0%}", f"{high:.0%}"
    return low if low == high else f"{low[:-1]} to {high}"


# --- predicted ------------------------------------------------------------------------------------

RESNET = Job("ResNet-50, batch 256, mixed precision", 25.56e6 * 4, 256 / 2470, "[1]")
GPT2 = Job("GPT-2 of 124M, 12 x 1,024 tokens, bf16", 124.4e6 * 4, 12 * 1024 / 106_700, "[2]")
LINKS = [
    *(Link(f"{gigabits} Gbit/s", gigabits * 1e9 / 8, 8) for gigabits in (1, 10, 25, 100, 400)),
    Link("NVLink (A100), one node", 300e9, 8),
]
COUNTS = (2, 8, 16, 64, 256, 1024)


def predicted(job: Job) -> list[str]:
    rows = [
        f"| {job.name} | " + " | ".join(f"{count:,}" for count in COUNTS) + " |",
        "| --- |" + " --- |" * len(COUNTS),
    ]
    for link in LINKS:
        one_node = link.name.startswith("NVLink")
        # On a network each device is a node of its own, until there are more than eight nodes.
        cells = []
        for count in COUNTS:
            if one_node:
                cells.append(span(*efficiencies(job, count, link)) if count <= 8 else "")
            else:
                per_node = 1 if count <= 8 else 8
                cells.append(span(*efficiencies(job, count, link._replace(devices=per_node))))
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
            times.append(step_seconds(part, count, link)[0] if count > 1 else part.seconds)
        faster = {count: times[0] / time for count, time in zip(counts, times, strict=True)}
        pays = [count for count in counts[2:] if faster[count] >= 1.5 * faster[count // 2]]
        cells = [f"{faster[count]:.1f} times" for count in (8, 64, 256, 1024)]
        rows.append(f"| {link.name} | {' | '.join(cells)} | {max(pays, default=1):,} |")
    return rows


# --- published ------------------------------------------------------------------------------------

PUBLISHED = [  # a job, its link, devices, and the efficiency that was published, with its source
    (Job("Inception V3", 23.8e6 * 4, 64 / 142, "[3]"), Link("25 Gbit/s", 25e9 / 8, 4), 512, 0.90),
    (
        Job("ResNet-101", 44.5e6 * 4, 64 * 16 / 1656.82, "[3]"),
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
CASES = [  # model, samples per step and node, link, steps per epoch
    ("mlp", 8, "100mbit", 20),
    ("mlp", 8, "1gbit", 60),
    ("resnet18", 2, "100mbit", 4),
    ("resnet18", 2, "1gbit", 10),
]


def measure() -> dict:
    """Train on the tests' nodes, and on two of them also --check."""
    sys.path.insert(0, str(ROOT / "tests"))
    import platform
    import tempfile

    import torch
    from helpers.files import idx_files
    from helpers.hosts import Hosts
    from helpers.jobs import Job, command, epochs

    plain = {"GLOO_SOCKET_IFNAME": "", "MASTER_ADDR": "", "MASTER_PORT": ""}
    runs = []

    def on_nodes(hosts: Hosts, folder: Path, count: int, *arguments: object) -> str:
        jobs = []
        for rank in range(count):
            own = folder / f"node{rank}"
            own.mkdir(exist_ok=True)
            method = f"tcp://{hosts.address(0)}:22225"
            where = ("--init-method", method, "--rank", rank, "--world-size", count)
            words = command("multinode.py", 2, 100, "--no-progress", *arguments, *where)
            jobs.append(Job(words, own, plain, fork=True, host=hosts.name(rank)))
        texts = [job.finish(seconds=900) for job in jobs]
        return texts[0]

    for model, batch_size, link, steps in CASES:
        for accumulate in (1, 8):
            for count in NODES:
                with tempfile.TemporaryDirectory() as name, Hosts(count) as hosts:
                    hosts.shape(link)
                    folder = Path(name)
                    data = idx_files(folder / "data", steps * batch_size * accumulate * count, 10)
                    options = ("--dataset", "fashion-mnist", "--data-dir", data, "--model", model)
                    options += ("--batch-size", batch_size, "--accumulate", accumulate)
                    text = on_nodes(hosts, folder, count, *options)
                    run = {"model": model, "link": link, "accumulate": accumulate, "nodes": count}
                    run["rate"] = epochs(text)[-1]["rate"]
                    if count == 2:
                        text = on_nodes(hosts, folder, count, *options, "--check")
                        run["check"] = text[text.index("All-reduce | ") :].splitlines()
                    runs.append(run)
                    print(run, flush=True)
    machine = f"{platform.machine()}, {torch.get_num_threads()} CPU cores"
    return {"machine": machine, "torch": torch.__version__, "runs": runs}


def measured(result: dict) -> list[str]:
    head = "| model, link, `--accumulate` | " + " | ".join(str(count) for count in NODES)
    rows = [f"{head} | 8, predicted | error |", "| --- |" + " --- |" * (len(NODES) + 2)]
    keys = dict.fromkeys((run["model"], run["link"], run["accumulate"]) for run in result["runs"])
    for key in keys:
        runs = [
            run for run in result["runs"] if (run["model"], run["link"], run["accumulate"]) == key
        ]
        rates = {run["nodes"]: run["rate"] for run in runs}
        (check,) = (run["check"] for run in runs if run["nodes"] == 2)
        (foreseen,) = (
            float(found[1])
            for line in check
            if (found := re.match(r"Predicted \| 8 nodes \| (\d+) samples/s", line))
        )
        cells = [f"{rates[count]:,.0f}" for count in NODES]
        cells += [f"{foreseen:,.0f}", f"{foreseen / rates[8] - 1:+.0%}"]
        rows.append(f"| {key[0]}, {key[1]}/s, {key[2]} | " + " | ".join(cells) + " |")
    rows += ["", f"({result['machine']}, torch {result['torch']}; samples per second.)"]
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
        shares = [
            efficiencies(RESNET, count, link._replace(devices=1 if count <= 8 else 8))
            for count in counts
        ]
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


def written(page: str, result: dict | None) -> str:
    """The page with what this program knows between its marks."""
    parts = {
        **({"measured": measured(result)} if result else {}),
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
    result = json.loads(DATA.read_text()) if DATA.exists() else None
    PAGE.write_text(written(PAGE.read_text(), result))
    plot(PICTURE)
