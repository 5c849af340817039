"""RESULTS.md and throughput.svg from results.json: run.py calls it.

Alone it writes them again, after a change of the page's text: python benchmarks/report.py [DIR]
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

COMMAND = "python benchmarks/run.py"
FIRST = "time to the first step"
TARGETS = [  # case, ours, against, at least (for times: at most)
    ("mlp-32-1", "single_gpu.py", "compute alone", 0.95),
    ("mlp-256-1", "single_gpu.py", "compute alone", 0.95),
    *(
        (case, ours, theirs, target)
        for ours in ("ddp_spawn.py", "ddp_torchrun.py")
        for case, theirs, target in (
            ("mlp-32-2", "compute + all-reduce", 0.95),
            ("mlp-256-2", "compute + all-reduce", 1.0),
            ("mlp-32-2", "tutorial", 4),
            ("mlp-256-2", "tutorial", 7),
            ("mlp-32-2", "Fabric", 1.25),
            ("mlp-32-2", "Accelerate", 1.25),
            ("mlp-256-2", "Fabric", 1.6),
            ("mlp-256-2", "Accelerate", 1.6),
        )
    ),
    ("mlp-32-2-accumulate", "ddp_torchrun.py --accumulate 8", "the same, 1 process, 1 thread", 1.8),
]
TIMES = [
    ("mlp-32-1", "single_gpu.py", "tutorial"),
    ("mlp-32-2", "ddp_spawn.py", "tutorial"),
    ("mlp-32-2", "ddp_torchrun.py", "tutorial"),
]
COLOURS = ("tab:blue", "silver", "tab:orange")  # ours, the others, the floor
TOLERANCE = 5  # percentage points of accuracy, after the same epochs


def runs(result: dict, case: str, contestant: str) -> dict[int, dict]:
    """A contestant's runs that worked, by round."""
    return {
        record["round"]: record
        for record in result["records"]
        if (record["case"], record["contestant"]) == (case, contestant) and "error" not in record
    }


def rate(record: dict) -> float:
    return statistics.median(record["rates"][1:])  # the first epoch is warm-up


def ratio(result: dict, case: str, ours: str, theirs: str, value: Callable = rate) -> float | None:
    """The median of the rounds' ratios: what slows the machine down slows both."""
    a, b = runs(result, case, ours), runs(result, case, theirs)
    ratios = [value(a[number]) / value(b[number]) for number in a.keys() & b.keys()]
    return statistics.median(ratios) if ratios else None


def targets(result: dict) -> str:
    lines = [
        "| case | script | against | target | reached | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case, ours, theirs, target in TARGETS:
        reached = ratio(result, case, ours, theirs)
        if reached is not None:
            verdict = "yes" if reached >= target else "no"
            lines.append(f"| {case} | {ours} | {theirs} | {target} | {reached:.2f} | {verdict} |")
    for case, ours, theirs in TIMES:
        reached = ratio(result, case, ours, theirs, lambda record: record["first_step"])
        if reached is not None:
            verdict, against = "yes" if reached <= 1 else "no", f"{theirs}, {FIRST}"
            lines.append(f"| {case} | {ours} | {against} | at most 1 | {reached:.2f} | {verdict} |")
    return "\n".join(lines if len(lines) > 2 else ["None of these cases was measured."])


def names(result: dict, case: str) -> list[str]:
    return list(dict.fromkeys(r["contestant"] for r in result["records"] if r["case"] == case))


def accuracies(result: dict, case: str) -> tuple[int, dict[str, float]]:
    """After how many epochs, the most that all have done; and everybody's.

    The tutorial's program with threads left alone is too slow for that: it is left out where the
    same program with one thread stands for it.
    """
    done = [r for r in result["records"] if r["case"] == case and "error" not in r]
    if any(record["contestant"] == "tutorial, 1 thread" for record in done):
        done = [record for record in done if record["contestant"] != "tutorial"]
    common = min((len(record["accuracies"]) for record in done), default=0)
    return common, {r["contestant"]: r["accuracies"][common - 1] for r in done}


def odd_ones(result: dict) -> list[str]:
    """Who does not learn what the others of its case learn. Alone, a process has half the data."""
    found = []
    for case in result["cases"]:
        epochs, values = accuracies(result, case)
        values = {name: v for name, v in values.items() if name != "compute alone"}
        middle = statistics.median(values.values()) if values else 0
        for name, value in values.items():
            if abs(value - middle) > TOLERANCE:
                line = (
                    f"{case}, {name}: {value:.1f}% after {epochs} epochs, the median {middle:.1f}%"
                )
                found.append(line)
    return found


def table(result: dict, case: str) -> list[str]:
    contestants = names(result, case)
    epochs, accuracy = accuracies(result, case)
    first = contestants[0]
    lines = [
        f"| | samples/s | lowest to highest round | {first} against it | first step after "
        f"| peak memory, MB | accuracy after {epochs} epochs |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in contestants:
        records = runs(result, case, name).values()
        if not records:
            lines.append(f"| {name} | failed | | | | | |")
            continue
        rates = [rate(record) for record in records]
        against = ratio(result, case, first, name)
        against = "" if name == first or against is None else f"{against:.2f}"
        start = statistics.median(record["first_step"] for record in records)
        learnt = f"{accuracy[name]:.1f}%" if name in accuracy else ""
        memory = max(record["memory"] for record in records)
        lines.append(
            f"| {name} | {statistics.median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
            f"| {against} | {start:.1f} s | {memory:,.0f} | {learnt} |"
        )
    return lines


def splits(result: dict) -> list[str]:
    lines = []
    for split in result["splits"]:
        if "error" in split:
            lines.append(f"{split['device']}, batch {split['batch']}: failed ({split['error']})")
            continue
        if not lines:
            lines += [
                "| | batch | data | forward | backward | update | waiting |",
                "| --- |" + " ---: |" * 6,
            ]
        parts = " | ".join(
            f"{split[part]:.3f}" for part in ("data", "forward", "backward", "update", "waiting")
        )
        lines.append(f"| {split['what']} on {split['device']} | {split['batch']} | {parts} |")
    return lines


def page(result: dict) -> str:
    machine = "\n".join(f"| {name} | {value} |" for name, value in result["machine"].items())
    odd = odd_ones(result)
    learnt = f"All programs of a case are within {TOLERANCE} percentage points of its median."
    left_out = "".join(f"- {line}\n" for line in result["left_out"])
    gpu = any(case.get("gpu") for case in result["cases"].values())
    unmeasured = ("" if gpu else "No GPU was measured. ") + (
        "Nothing here was measured on several GPUs or on hosts with a network between them: the "
        "hosts are namespaces of this machine, which share its cores."
    )
    sections = "\n\n".join(
        "\n".join([f"### {case['title']}", "", f"`{key}`", "", *table(result, key)])
        for key, case in result["cases"].items()
    )
    return f"""\
# Results

Written by `{COMMAND}` in {result["minutes"]:.0f} minutes.

| | |
| --- | --- |
{machine}

{unmeasured}

{f"Left out:{chr(10) * 2}{left_out.rstrip()}" if left_out else "Nothing was left out."}

![Throughput and scaling](throughput.svg)

## Targets

Ratios of samples a second, and of seconds in the last rows: the median of the rounds' ratios.

{targets(result)}

## How to read the tables

In each round all programs of a case run one after the other, each for {result["seconds"]} s after a
first epoch that does not count; a round's rate is the median of its epochs. `tutorial` is the
tutorials' loop as published (`tutorial.py`); `tutorial, 1 thread` is the same with
`OMP_NUM_THREADS=1`; `compute alone` is forward, backward and update on batches that lie ready, each
process for itself; `compute + all-reduce` adds one flat all-reduce of the gradient a step. All
have the same model, data, batches and optimizer. The first step's time counts from the command.
Memory is that of the process that took the most, shared pages included. Hosts have one process and
one thread each.

{learnt if not odd else "Accuracies that differ: " + "; ".join(odd) + "."}

## Where a step's time goes

Milliseconds a step under `torch.profiler`, which costs time itself: read the proportions. See
`split.py` for what `waiting` is.

{chr(10).join(splits(result))}

## All cases

{sections}
"""


def plot(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "ladder", "font.size": 9})
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, case in zip(axes[0], ("mlp-32-2", "mlp-256-2"), strict=True):
        shown = [name for name in names(result, case) if runs(result, case, name)][::-1]
        rates = [[rate(r) for r in runs(result, case, name).values()] for name in shown]
        middles = [statistics.median(values) for values in rates]
        spread = [
            [middle - min(values) for middle, values in zip(middles, rates, strict=True)],
            [max(values) - middle for middle, values in zip(middles, rates, strict=True)],
        ]
        kinds = [0 if ".py" in name else 2 if "compute" in name else 1 for name in shown]
        colours = [COLOURS[kind] for kind in kinds]
        axis.barh(shown, middles, xerr=spread, color=colours)
        axis.set_title(result["cases"].get(case, {}).get("title", case), fontsize=9)
        axis.set_xlabel("samples a second")
    series = {
        "ours": ("single_gpu.py", "ddp_torchrun.py", "multinode.py"),
        "tutorial, 1 thread": ("tutorial, 1 thread",),
        "compute + all-reduce": ("compute + all-reduce",),
    }
    places = {"1 process": "1", "2": "2", "4": "4", "2 hosts": "2hosts", "3 hosts": "3hosts"}
    places |= {"2 hosts,\n1 Gbit/s": "2hosts-1gbit", "2 hosts,\n100 Mbit/s": "2hosts-100mbit"}
    for axis, model in zip(axes[1], ("mlp-32", "mlp-256"), strict=True):
        for number, (label, contestants) in enumerate(series.items()):
            heights = []
            for place in places.values():
                # One process needs no all-reduce: there the floor is compute alone.
                floor = place == "1" and label == "compute + all-reduce"
                shown = ("compute alone",) if floor else contestants
                found = [runs(result, f"{model}-{place}", name).values() for name in shown]
                rates = next(
                    ([rate(record) for record in records] for records in found if records), [0]
                )
                heights.append(statistics.median(rates))
            at = [place + 0.27 * (number - 1) for place in range(len(places))]
            axis.bar(at, heights, 0.27, label=label, color=COLOURS[number])
        axis.set_xticks(range(len(places)), places, fontsize=7)
        axis.set_title(f"{model.replace('-', ', batches of ')}", fontsize=9)
        axis.set_ylabel("samples a second")
        axis.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write(result: dict, out: Path) -> None:
    (out / "RESULTS.md").write_text(page(result))
    plot(result, out / "throughput.svg")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    write(json.loads((folder / "results.json").read_text()), folder)
