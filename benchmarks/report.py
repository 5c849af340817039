"""RESULTS.md and throughput.svg from results.json: run.py calls it.

Alone it writes them again, after a change of the page's text: python benchmarks/report.py [DIR]
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMAND = "python benchmarks/run.py"
FIRST = "time to the first step"
BOUNDS = ("compute alone", "compute + all-reduce", "compute + all-reduce, mp.spawn")
TARGETS = [  # case, ours, against, at least (for times: at most)
    ("mlp-32-1", "single_gpu.py", "compute alone", 0.95),
    ("mlp-256-1", "single_gpu.py", "compute alone", 0.95),
    *(
        (case, ours, theirs, target)
        for ours in ("ddp_spawn.py", "ddp_torchrun.py")
        for case, theirs, target in (
            *(
                (case, bound, target)
                for case, target in (("mlp-32-2", 0.95), ("mlp-256-2", 0.97))
                for bound in BOUNDS[1:]
                if ours == "ddp_spawn.py" or bound == BOUNDS[1]  # mp.spawn's only for mp.spawn
            ),
            ("mlp-32-2", "tutorial", 4),
            ("mlp-256-2", "tutorial", 7),
            ("mlp-32-2", "Fabric", 1.25),
            ("mlp-32-2", "Accelerate", 1.25),
            ("mlp-256-2", "Fabric", 1.6),
            ("mlp-256-2", "Accelerate", 1.6),
        )
    ),
    *(
        (case, "ddp_torchrun.py --accumulate 8", "the same, 1 process, 1 thread", 1.8)
        for case in ("mlp-32-2-accumulate", "mlp-256-2-accumulate")
    ),
]
TIMES = [
    ("mlp-32-1-start", "single_gpu.py", "tutorial"),
    ("mlp-32-2-start", "ddp_spawn.py", "tutorial"),
    ("mlp-32-2-start", "ddp_torchrun.py", "tutorial"),
]
COLOURS = ("tab:blue", "silver", "tab:orange")  # ours, the others, the upper bound
LEFT_OUT = ("compute alone", "compute + all-reduce, mp.spawn")  # of the picture
TOLERANCE = 5  # percentage points of accuracy, after the same epochs


def summary(result: dict) -> dict:
    """What the page needs of run.py's figures: of each run one rate and one accuracy, of all its
    epochs. All other functions here take this.

    A rate is the median without the first epoch, which is warm-up. The accuracy is that after as
    many epochs as all runs of the case have done. (The tutorial's program with threads left alone
    is too slow for that: it has none where the same program with one thread stands for it.)
    """
    stands_for = {"tutorial": "tutorial, 1 thread"}
    worked = [record for record in result["records"] if "error" not in record]
    names = {(record["case"], record["contestant"]) for record in worked}
    epochs = {}  # of each case
    for record in result["records"]:
        case, name = record["case"], record["contestant"]
        done = len(record.get("accuracies", ()))
        if done > 1 and (case, stands_for.get(name)) not in names:
            epochs[case] = min(done, epochs.get(case, done))
    records = []
    for record in result["records"]:
        case, name = record["case"], record["contestant"]
        kept = {"case": case, "contestant": name, "round": record["round"]}
        if "error" in record:
            records.append({**kept, "error": record["error"]})
            continue
        kept |= {"first_step": round(record["first_step"], 4), "memory": round(record["memory"], 2)}
        if len(record["rates"]) > 1:  # not of a case that stops at the first step
            kept["rate"] = statistics.median(record["rates"][1:])
            if (case, stands_for.get(name)) not in names:
                kept |= {"epochs": epochs[case], "accuracy": record["accuracies"][epochs[case] - 1]}
        records.append(kept)
    return {**result, "records": records}


def dumps(result: dict) -> str:
    """A summary as JSON, with a line for each run."""
    lines = ",\n  ".join(json.dumps(record) for record in result["records"])
    text = json.dumps({**result, "records": ["HERE"]}, indent=1)
    return text.replace('"HERE"', lines) + "\n"


def runs(result: dict, case: str, contestant: str) -> dict[int, dict]:
    """A contestant's runs that worked, by round."""
    return {
        record["round"]: record
        for record in result["records"]
        if (record["case"], record["contestant"]) == (case, contestant) and "error" not in record
    }


def rate(record: dict) -> float:
    return record["rate"]


def first_step(record: dict) -> float:
    return record["first_step"]


def ratios(result: dict, case: str, ours: str, theirs: str, value: Callable = rate) -> list[float]:
    """Of each round: what slows the machine down slows both."""
    a, b = runs(result, case, ours), runs(result, case, theirs)
    return [value(a[number]) / value(b[number]) for number in sorted(a.keys() & b.keys())]


def ratio(result: dict, case: str, ours: str, theirs: str, value: Callable = rate) -> float | None:
    found = ratios(result, case, ours, theirs, value)
    return statistics.median(found) if found else None


def standard_error(found: list[float]) -> float:
    """Of the median; 0 where there are too few rounds to tell."""
    return 1.25 * statistics.stdev(found) / len(found) ** 0.5 if len(found) > 2 else 0.0


def spread(found: list[float]) -> str:
    """The median, its standard error where there are rounds to tell, the lowest and the highest."""
    error = f" ± {standard_error(found):.2f}" if len(found) > 2 else ""
    return f"{statistics.median(found):.2f}{error} ({min(found):.2f} to {max(found):.2f})"


def verdict(found: list[float], target: float, at_most: bool = False) -> str:
    """Whether the target is reached; undecided where it lies within two errors of the median."""
    over = statistics.median(found) - target
    if abs(over) < 2 * standard_error(found):
        return "undecided"
    return "yes" if over == 0 or (over < 0) == at_most else "no"


def limit(result: dict, case: str, theirs: str) -> float | None:
    """What the upper bound reaches against `theirs`."""
    if theirs in BOUNDS:
        return None
    option = " --accumulate 8" if case.endswith("-accumulate") else ""
    return ratio(result, case, BOUNDS[1] + option, theirs)


def targets(result: dict) -> str:
    lines = [
        "| case | script | against | target | reached | | the upper bound reaches |",
        "| --- | --- | --- | ---: | ---: | --- | ---: |",
    ]
    for case, ours, theirs, target in TARGETS:
        if found := ratios(result, case, ours, theirs):
            most = limit(result, case, theirs)
            cells = [case, ours, theirs, str(target), spread(found), verdict(found, target)]
            cells.append("" if most is None else f"{most:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    for case, ours, theirs in TIMES:
        if found := ratios(result, case, ours, theirs, first_step):
            line = f"| {case} | {ours} | {theirs}, {FIRST} | at most 1 | {spread(found)} "
            lines.append(f"{line}| {verdict(found, 1, at_most=True)} | |")
    for copies in result.get("copies", []):
        if copies["what"] == "ddp_spawn.py" and "error" not in copies:
            # Two processes with a copy each have 2; where /proc does not tell, it is 0.
            once = "yes" if 0.5 < copies["copies"] < 1.5 else "no"
            line = "| memory, below | ddp_spawn.py | the data set, held once a host | 1 copy "
            lines.append(f"{line}| {copies['copies']:.2f} copies | {once} | |")
    return "\n".join(lines if len(lines) > 2 else ["None of these cases was measured."])


def choices(result: dict) -> str:
    """What each choice in the scripts buys: how they do with another."""
    cases = [f"mlp-{batch}-2-choices" for batch in (32, 256)]
    cases = [case for case in cases if case in result["cases"]]
    if not cases:
        return "These cases were not measured."
    lines = [
        "| instead | " + " | ".join(f"{c}: samples/s | first step after" for c in cases) + " |",
        "| --- |" + " ---: |" * 2 * len(cases),
    ]
    for name in names(result, cases[0]):
        base = "ddp_torchrun.py" if name.startswith("ddp_torchrun.py") else "ddp_spawn.py"
        if name == base:
            continue
        cells = []
        for case in cases:
            for value in (rate, first_step):
                found = ratios(result, case, name, base, value)
                cells.append(spread(found) if found else "failed")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def names(result: dict, case: str) -> list[str]:
    return list(dict.fromkeys(r["contestant"] for r in result["records"] if r["case"] == case))


def accuracies(result: dict, case: str) -> tuple[int, dict[str, float]]:
    """After how many epochs, and everybody's."""
    done = [r for r in result["records"] if r["case"] == case and "accuracy" in r]
    epochs = done[0]["epochs"] if done else 0
    return epochs, {r["contestant"]: r["accuracy"] for r in done}


def odd_ones(result: dict) -> list[str]:
    """Who does not learn what the others of its case learn."""
    found = []
    for case in result["cases"]:
        epochs, values = accuracies(result, case)
        # Alone, a process has half the data; --accumulate makes eight times the global batch.
        other = ["accumulate", "the same"]
        other += ["compute alone"] if case.split("-")[2] != "1" else []
        values = {n: v for n, v in values.items() if not any(word in n for word in other)}
        middle = statistics.median(values.values()) if values else 0
        for name, value in values.items():
            if abs(value - middle) > TOLERANCE:
                line = (
                    f"{case}, {name}: {value:.1f}% after {epochs} epochs, the median {middle:.1f}%"
                )
                found.append(line)
    return found


def start_table(result: dict, case: str) -> list[str]:
    contestants = names(result, case)
    lines = [
        "| | first step after | fastest to slowest round | the tutorial's time is 1 |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in contestants:
        times = [first_step(record) for record in runs(result, case, name).values()]
        if not times:
            lines.append(f"| {name} | failed | | |")
            continue
        against = ratio(result, case, name, "tutorial", first_step)
        against = "" if name == "tutorial" or against is None else f"{against:.2f}"
        middle, rounds = statistics.median(times), f"{min(times):.1f} to {max(times):.1f} s"
        lines.append(f"| {name} | {middle:.1f} s | {rounds} | {against} |")
    return lines


def table(result: dict, case: str) -> list[str]:
    if case.endswith("-start"):
        return start_table(result, case)
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


def memory(result: dict) -> list[str]:
    lines = ["| | samples, fewer and more | copies of the data set |", "| --- | --- | ---: |"]
    for copies in result.get("copies", []):
        if "error" in copies:
            lines.append(f"| {copies['what']} | failed ({copies['error']}) | |")
            continue
        few, many = copies["samples"]
        lines.append(f"| {copies['what']} | {few:,} and {many:,} | {copies['copies']:.2f} |")
    return lines if len(lines) > 2 else ["This was not measured."]


def caption(key: str, case: dict) -> str:
    return f"`{key}`" if key.endswith("-start") else f"`{key}`, {case['seconds']:g} s a run"


def page(result: dict) -> str:
    machine = "\n".join(f"| {name} | {value} |" for name, value in result["machine"].items())
    odd = odd_ones(result)
    one, two = "the same, 1 process, 1 thread", "ddp_torchrun.py --accumulate 8"
    gain = ratio(result, "mlp-256-2-accumulate", two, one)
    pays = ""
    if gain:  # that case was measured
        pays = "With batches of 256 and one all-reduce for eight of them, two processes do\n"
        pays += f"{gain:.1f} times what one does, on a core each.\n"
    learnt = f"The accuracies of a case are within {TOLERANCE} percentage points of its median."
    left_out = "".join(f"- {line}\n" for line in result["left_out"])
    gpu = any(case.get("gpu") for case in result["cases"].values())
    unmeasured = ("" if gpu else "No GPU was measured. ") + (
        "Nothing here was measured on several GPUs or on hosts with a network between them: the "
        "hosts are namespaces of this machine, which share its cores."
    )
    sections = "\n\n".join(
        "\n".join([f"### {case['title']}", "", caption(key, case), "", *table(result, key)])
        for key, case in result["cases"].items()
    )
    return f"""\
# Results

Written by `{COMMAND}` in {result["minutes"]:.0f} minutes.

| | |
| --- | --- |
{machine}

{unmeasured} The figures are those of the scripts at Source, and not of each commit since.

{f"Left out:{chr(10) * 2}{left_out.rstrip()}" if left_out else "Nothing was left out."}

![Throughput and scaling](throughput.svg)

Data parallelism pays where a step computes for longer than its all-reduce takes. With batches of
32 the mlp computes for a millisecond or two and then all-reduces 2.7 MB, on cores that one process
could have had to itself.
{pays}[docs/scaling.md](../docs/scaling.md) has the arithmetic. Orange is the upper bound: nothing
but computing, and one all-reduce.

## Targets

Ratios of samples a second, and of seconds in the last rows: the median of the rounds' ratios, its
standard error (1.25 times their standard deviation, over the root of their number), and in brackets
the lowest and the highest. A target within twice the error of the median is undecided; yes and no
are decided before rounding. `the upper bound reaches` is the same ratio of compute + all-reduce:
where that is below the target, nothing can reach it.

{targets(result)}

## What the choices buy

Each row changes one choice of the script, in a copy: ratios to the script as it is, of samples a
second (below 1: the script's choice pays) and of the seconds to the first step (above 1: it pays).
A median near 1 with rounds on both sides says nothing. Two are measured, not used: `SGD fused`
would round differently, so that results change; `a session for each process` would hide the
processes from the terminal, which could not stop (Ctrl-Z) or kill them together any more.

{choices(result)}

## How to read the tables

In each round all programs of a case run one after the other, in an order drawn anew, each for some
seconds after a first epoch that does not count; a round's rate is the median of its epochs.
`tutorial` is the tutorials' loop as published (`tutorial.py`); `tutorial, 1 thread` is the same
with `OMP_NUM_THREADS=1`; `compute alone` is forward, backward and update on batches that lie ready,
each process for itself; `compute + all-reduce` adds one flat all-reduce of the gradient a step.
torchrun starts it, and `compute + all-reduce, mp.spawn` is the same started as `ddp_spawn.py` is:
torchrun gives each process a session of its own, and Linux may share out the cores by session (what
that brings is above: `a session for each process`). These two are the upper bound. `our data` is
the same program on the scripts' data set, which is in memory and gives whole batches: what it gains
is the data path's, and the rest of the distance to the scripts is the loop's. All have the same
model, data, batches and optimizer, SGD with momentum. The scripts closest to the upper bound, and
this, run in more rounds than the others. The first step's time counts from the command; cases `to
the first step` stop there. Memory is that of the process that took the most, shared pages included.
Hosts have one process and one thread each.

{learnt if not odd else "Accuracies that differ: " + "; ".join(odd) + "."} Not compared are programs
that take other steps: `compute alone` on several processes, each with its part of the data, and
those with `--accumulate`.

## Where a step's time goes

Milliseconds a step under `torch.profiler`, which costs time itself: read the proportions. See
`split.py` for what `waiting` is.

{chr(10).join(splits(result))}

## How often the data set is in memory

With two processes on one host: the memory of all processes of the job, shared pages counted once,
with many samples less that with few, over the difference in data. (torchrun's processes load the
data each for itself.)

{chr(10).join(memory(result))}

## All cases

{sections}
"""


def bars(axis: Any, shown: dict[str, dict[int, dict]]) -> None:
    """A bar for the runs of each contestant: the median rate, the lowest and the highest."""
    rates = {name: [rate(run) for run in found.values()] for name, found in shown.items() if found}
    rates = dict(reversed(rates.items()))  # the first is to be on top
    middles = [statistics.median(values) for values in rates.values()]
    lowest, highest = ([extreme(values) for values in rates.values()] for extreme in (min, max))
    errors = [
        [middle - low for middle, low in zip(middles, lowest, strict=True)],
        [high - middle for middle, high in zip(middles, highest, strict=True)],
    ]
    kinds = [0 if ".py" in name else 2 if "compute" in name else 1 for name in rates]
    axis.barh([*rates], middles, xerr=errors, color=[COLOURS[kind] for kind in kinds])
    axis.set_xlabel("samples per second")


def plot(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "ladder", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    case, one = "mlp-256-2-accumulate", "the same, 1 process, 1 thread"
    shown = {
        "1 process, 1 core": runs(result, case, one),
        "2 processes:\nddp_torchrun.py": runs(result, case, "ddp_torchrun.py --accumulate 8"),
        "compute +\nall-reduce": runs(result, case, "compute + all-reduce --accumulate 8"),
    }
    bars(axes[0][0], shown)
    axes[0][0].set_title("It pays: mlp, batches of 256, --accumulate 8", fontsize=9)
    one = {"1 process, 2 cores:\nsingle_gpu.py": runs(result, "mlp-32-1", "single_gpu.py")}
    two = {name: runs(result, "mlp-32-2", name) for name in names(result, "mlp-32-2")}
    bars(axes[0][1], one | {name: two[name] for name in two if name not in LEFT_OUT})
    axes[0][1].set_title("It does not: mlp, batches of 32", fontsize=9)
    series = {
        "ours": ("single_gpu.py", "ddp_torchrun.py", "multinode.py"),
        "tutorial, 1 thread": ("tutorial, 1 thread",),
        "upper bound": ("compute + all-reduce",),
    }
    measured = {record["case"] for record in result["records"]}
    places = {"1": "1", "2": "2", "4": "4", "2 nodes": "2hosts", "3 nodes": "3hosts"}
    places |= {"2 nodes,\n1 Gbit/s": "2hosts-1gbit", "2 nodes,\n100 Mbit/s": "2hosts-100mbit"}
    for axis, model in zip(axes[1], ("mlp-32", "mlp-256"), strict=True):
        shown = {text: place for text, place in places.items() if f"{model}-{place}" in measured}
        for number, (label, contestants) in enumerate(series.items()):
            heights = []
            for place in shown.values():
                # One process needs no all-reduce: there compute alone is the upper bound.
                alone = place == "1" and label.startswith("upper bound")
                named = ("compute alone",) if alone else contestants
                found = [runs(result, f"{model}-{place}", name).values() for name in named]
                rates = next(
                    ([rate(record) for record in records] for records in found if records), [0]
                )
                heights.append(statistics.median(rates))
            at = [place + 0.27 * (number - 1) for place in range(len(shown))]
            axis.bar(at, heights, 0.27, label=label, color=COLOURS[number])
        axis.set_xticks(range(len(shown)), shown, fontsize=7)
        axis.set_title(f"{model.replace('-', ', batches of ')}: processes, nodes", fontsize=9)
        axis.set_ylabel("samples per second")
        axis.legend(loc="upper right")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write(result: dict, out: Path) -> None:
    (out / "RESULTS.md").write_text(page(result))
    plot(result, out / "throughput.svg")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    write(json.loads((folder / "results.json").read_text()), folder)
