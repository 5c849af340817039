"""The tables of RESULTS.md from results.json: run.py calls it.

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
COLUMNS = {  # of the table: a case -> its head, and the upper bound there
    "mlp-32-1": ("1 process, 32", ALONE),
    "mlp-256-1": ("1 process, 256", ALONE),
    "mlp-32-2": ("2 processes, 32", TOGETHER),
    "mlp-256-2": ("2 processes, 256", TOGETHER),
    "resnet18-32-2": ("ResNet-18, 2 processes, 32", TOGETHER),
}


def names(result: dict, *cases: str) -> list[str]:
    """The contestants of these cases: our scripts, what you would run instead, the upper bounds."""
    found = [record["contestant"] for record in result["records"] if record["case"] in cases]
    kind = lambda name: 2 if "compute" in name else ".py" not in name and name != ONE  # noqa: E731
    return sorted(dict.fromkeys(found), key=kind)


def runs(result: dict, case: str, contestant: str) -> dict[int, float]:
    """Samples per second of a contestant, by round."""
    return {
        record["round"]: record["rate"]
        for record in result["records"]
        if (record["case"], record["contestant"]) == (case, contestant)
    }


def ratios(result: dict, case: str, ours: str, theirs: str) -> list[float]:
    """Of each round: what slows the machine down slows both."""
    a, b = runs(result, case, ours), runs(result, case, theirs)
    return [a[number] / b[number] for number in sorted(a.keys() & b.keys())]


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
    return lines if cases else []


def changed(result: dict) -> list[str]:
    """A line for each script that ran beside its older version, with an error of the median."""
    lines = {}
    for case in dict.fromkeys(record["case"] for record in result["records"]):
        if "-before-" in case and (found := ratios(result, case, *names(result, case))):
            error = 1.25 * statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
            text = f"{statistics.median(found):.3f} ± {error:.3f}"
            text += f" ({min(found):.2f} to {max(found):.2f})"
            text += f" with batches of {case.split('-')[1]}"
            lines.setdefault(names(result, case)[0], []).append(text)
    return [f"- {script}: {', '.join(texts)}" for script, texts in lines.items()]


def odd_ones(result: dict) -> list[str]:
    """Who does not learn what the others of its case learn, so that rates cannot be compared."""
    found = []
    for case in COLUMNS:
        # Of two processes that compute alone, each learns from half of the data.
        records = [r for r in result["records"] if r["case"] == case and r["contestant"] != ALONE]
        values = {r["contestant"]: r["accuracy"] for r in records}
        middle = statistics.median([*values.values()] or [0])
        odd = [name for name in values if abs(values[name] - middle) > 5]  # percentage points
        learns = f"and the median is {middle:.1f}%"
        found += [f"- {case}: {name} learns {values[name]:.1f}%, {learns}" for name in odd]
    return found


def fill(page: str, parts: dict[str, list[str]]) -> str:
    """The page with these lines between the marks `<!-- name -->` and `<!-- end -->`."""
    for name, lines in parts.items():
        before, rest = page.split(f"<!-- {name} -->\n")
        _, after = rest.split("<!-- end -->", 1)
        page = "\n".join([f"{before}<!-- {name} -->", *lines, f"<!-- end -->{after}"])
    return page


def page(result: dict) -> str:
    machine = {**result["machine"], "It took": f"{result['minutes']:.0f} minutes"}
    parts = {"machine": ["| | |", "| --- | --- |"], "rates": table(result)}
    parts["machine"] += [f"| {name} | {value} |" for name, value in machine.items()]
    parts["changed"] = changed(result) or ["- not measured"]
    parts["odd ones"] = odd_ones(result) or ["- none"]
    return fill(PAGE.read_text(), parts)


def write(result: dict, out: Path) -> None:
    lines = ",\n  ".join(json.dumps(record) for record in result["records"])  # one for each run
    text = json.dumps({**result, "records": ["HERE"]}, indent=1).replace('"HERE"', lines)
    (out / "results.json").write_text(f"{text}\n")
    (out / "RESULTS.md").write_text(page(result))


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE.parent
    write(json.loads((folder / "results.json").read_text()), folder)
