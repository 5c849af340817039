"""The tables of RESULTS.md, and throughput.svg, from results.json: run.py calls it.

    python benchmarks/report.py [DIR]      writes them again

The sentences are in RESULTS.md: edit them there. This writes what stands between its marks.
"""

import json
import statistics
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().with_name("RESULTS.md")
ALONE, TOGETHER = BOUNDS = ("compute alone", "compute + all-reduce")
ONE = "the same, 1 process, 1 thread"
BEFORE = {script: f"{script} before" for script in ("ddp_spawn.py", "ddp_torchrun.py")}
TARGETS = [  # case, ours, against, at least
    ("mlp-32-2", "ddp_torchrun.py", TOGETHER, 0.95),
    ("mlp-256-2", "ddp_torchrun.py", TOGETHER, 0.97),
]
FIRST_STEPS = [  # processes, ours, theirs
    (1, "single_gpu.py", "tutorial"),
    (2, "ddp_spawn.py", "tutorial"),
    (2, "ddp_torchrun.py", "tutorial, torchrun"),
]
COLUMNS = {  # of the table: a case -> its head, and the upper bound there
    "mlp-32-1": ("1 process, 32", ALONE),
    "mlp-256-1": ("1 process, 256", ALONE),
    "mlp-32-2": ("2 processes, 32", TOGETHER),
    "mlp-256-2": ("2 processes, 256", TOGETHER),
    "resnet18-32-2": ("ResNet-18, 2 processes, 32", TOGETHER),
}


def runs(result: dict, case: str, contestant: str) -> dict[int, float]:
    """Samples per second of a contestant's runs that worked, by round."""
    return {
        record["round"]: record["rate"]
        for record in result["records"]
        if (record["case"], record["contestant"]) == (case, contestant) and "rate" in record
    }


def ratios(result: dict, case: str, ours: str, theirs: str) -> list[float]:
    """Of each round: what slows the machine down slows both."""
    a, b = runs(result, case, ours), runs(result, case, theirs)
    return [a[number] / b[number] for number in sorted(a.keys() & b.keys())]


def standard_error(found: list[float]) -> float:
    """Of the median; 0 where there are too few rounds to tell."""
    return 1.25 * statistics.stdev(found) / len(found) ** 0.5 if len(found) > 2 else 0.0


def verdict(found: list[float], target: float) -> str:
    """Whether the target is reached; undecided where it lies within two errors of the median."""
    over = statistics.median(found) - target
    if abs(over) < 2 * standard_error(found):
        return "undecided"
    return "reached" if over >= 0 else "missed"


def targets(result: dict) -> list[str]:
    lines = []
    for case, ours, theirs, target in TARGETS:
        if found := ratios(result, case, ours, theirs):
            reached = f"{statistics.median(found):.2f} ± {standard_error(found):.2f}"
            reached += f" ({min(found):.2f} to {max(found):.2f} in {len(found)} rounds)"
            line = f"`{case}`: {ours} is to do {target} of {theirs}. It does {reached}, "
            lines.append(f"- {line}which is **{verdict(found, target)}**.")
    return lines


def kind(contestant: str) -> int:
    """0: a script of ours, 1: what a user would run instead, 2: an upper bound."""
    if "compute" in contestant:
        return 2
    return int(contestant in BEFORE.values() or (".py" not in contestant and contestant != ONE))


def names(result: dict, *cases: str) -> list[str]:
    found = [record["contestant"] for record in result["records"] if record["case"] in cases]
    return sorted(dict.fromkeys(found), key=kind)


def odd_ones(result: dict) -> list[str]:
    """Who does not learn what the others of its case learn, so that rates cannot be compared."""
    found = []
    for case in COLUMNS:
        # Of two processes that compute alone, each learns from half of the data.
        records = [r for r in result["records"] if r["case"] == case and r["contestant"] != ALONE]
        values = {r["contestant"]: r["accuracy"] for r in records if "accuracy" in r}
        middle = statistics.median([*values.values()] or [0])
        odd = [name for name in values if abs(values[name] - middle) > 5]  # percentage points
        learns = f"and the median is {middle:.1f}%"
        found += [f"- {case}: {name} learns {values[name]:.1f}%, {learns}" for name in odd]
    return found


def table(result: dict) -> list[str]:
    """A row for each contestant: its median rate, and what it is of the upper bound's."""
    cases = [case for case in COLUMNS if names(result, case)]
    heads = [COLUMNS[case][0] for case in cases]
    lines = [f"| samples per second | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(cases)]
    frugal = [f"{case}-accumulate" for case in cases]
    for name in names(result, *cases, *frugal):
        cells = []
        for case in cases:
            bound = COLUMNS[case][1]
            if "--accumulate" in name or name == ONE:
                case, bound = f"{case}-accumulate", f"{TOGETHER} --accumulate 8"
            found = runs(result, case, name)
            cell = f"{statistics.median(found.values()):,.0f}" if found else ""
            if name not in (ALONE, bound) and (against := ratios(result, case, name, bound)):
                cell += f" ({statistics.median(against):.2f})"
            cells.append(cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def first_steps(result: dict) -> list[str]:
    """Medians of the seconds from the command line to the first step, and of where they go."""
    if not (records := result.get("first steps")):
        return []
    parts = [*max((record["seconds"] for record in records), key=len)]  # one process joins nobody
    lines = [f"| seconds | processes | all | of the tutorial's | {' | '.join(parts)} |"]
    lines.append("| --- |" + " ---: |" * (len(parts) + 3))
    for processes, *pair in FIRST_STEPS:
        of_these = [record for record in records if record["processes"] == processes]
        runs = [[r["seconds"] for r in of_these if r["contestant"] == name] for name in pair]
        whole = [[sum(run.values()) for run in own] for own in runs]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(*whole, strict=True))
        for name, own, seconds, cell in zip(pair, runs, whole, (f"{ratio:.2f}", ""), strict=True):
            cells = [str(processes), f"{statistics.median(seconds):.2f}", cell]
            for part in parts:
                found = [run[part] for run in own if part in run]
                cells.append(f"{statistics.median(found):.2f}" if found else "")
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def fill(page: str, parts: dict[str, list[str]]) -> str:
    """The page with these lines between the marks `<!-- name -->` and `<!-- end -->`."""
    for name, lines in parts.items():
        before, rest = page.split(f"<!-- {name} -->\n")
        _, after = rest.split("<!-- end -->", 1)
        page = "\n".join([f"{before}<!-- {name} -->", *lines, f"<!-- end -->{after}"])
    return page


def page(result: dict) -> str:
    machine = {**result["machine"], "It took": f"{result['minutes']:.0f} minutes"}
    rows = [f"| {name} | {value} |" for name, value in machine.items()]
    parts = {"machine": ["| | |", "| --- | --- |", *rows], "rates": table(result)}
    parts["first steps"] = first_steps(result)
    parts |= {"targets": targets(result), "odd ones": odd_ones(result) or ["- none"]}
    return fill(PAGE.read_text(), parts)


def plot(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    grey = "#6e7781"  # for light pages and dark ones
    plt.rcParams.update({"svg.hashsalt": "ladder", "svg.fonttype": "none", "font.size": 10})
    plt.rcParams.update(dict.fromkeys(("text.color", "xtick.color", "ytick.color"), grey))
    figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
    shown = ("ddp_torchrun.py", "ddp_spawn.py", "tutorial, 1 thread", "Fabric", "Accelerate")
    for name in reversed(("upper bound", *shown, "tutorial")):
        contestant = TOGETHER if name == "upper bound" else name
        if rates := [*runs(result, "mlp-256-2", contestant).values()]:
            rate = statistics.median(rates)
            axis.barh(name, rate, color=("tab:blue", "silver", "tab:orange")[kind(contestant)])
            axis.text(rate + 400, name, f"{rate:,.0f}", va="center")
    axis.set_title("Samples per second, two processes with batches of 256", fontsize=10)
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    figure.savefig(path, metadata={"Date": None}, transparent=True)
    plt.close(figure)


def write(result: dict, out: Path) -> None:
    lines = ",\n  ".join(json.dumps(record) for record in result["records"])  # one for each run
    text = json.dumps({**result, "records": ["HERE"]}, indent=1).replace('"HERE"', lines)
    (out / "results.json").write_text(f"{text}\n")
    (out / "RESULTS.md").write_text(page(result))
    plot(result, out / "throughput.svg")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE.parent
    write(json.loads((folder / "results.json").read_text()), folder)
