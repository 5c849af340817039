"""The diffs of docs/ladder/: what each step of the ladder changes, function by function.

    python docs/ladder.py    put the hunks and their numbers of lines into the pages

The headings and the sentences are the pages' own: edit them there. Under the heading of a function
each hunk has a paragraph and a block. Where the two do not match what the scripts have, the command
says which hunk has no sentence and which sentence has no hunk, leaves the page as it is, and fails.
"""

import ast
import difflib
import re
import sys
import textwrap
from itertools import chain, zip_longest
from pathlib import Path

INDEX = Path(__file__).with_suffix(".md")
ROOT = INDEX.parent.parent
STEPS = {  # each script, and the one that it grew from
    "data_parallel.py": "single_gpu.py",
    "ddp_spawn.py": "single_gpu.py",
    "ddp_torchrun.py": "ddp_spawn.py",
    "multinode.py": "ddp_torchrun.py",
}
HEADING = re.compile(r"### `(.+)`")
SECTION = re.compile(r"^ *# --- .* ---$", re.M)  # a heading in a script
COUNTS = re.compile(r"\d+ lines go and \d+ come")
CONTEXT = 1  # lines before and after a change


def page(script: str) -> Path:
    """The page of the step to this script."""
    return INDEX.with_suffix("") / f"{script.removesuffix('.py')}.md"


def parts(script: str) -> dict[str, list[str]]:
    """The lines of each function and method, and of what stands between them, by name.

    The module's docstring, which is the launch manual, is not among them.
    """
    code = (ROOT / script).read_text()
    body = ast.parse(code).body
    starts = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            starts[node.name] = node.lineno
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            starts |= {f"{node.name}.{method.name}": first_line(method) for method in methods}
        elif isinstance(node, ast.FunctionDef):
            starts[node.name] = first_line(node)
        elif isinstance(node, ast.If):
            starts["__main__"] = node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            starts.setdefault("imports", node.lineno)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            starts[node.targets[0].id] = node.lineno
        elif isinstance(node, ast.Expr) and node is not body[0]:
            starts[ast.unparse(node.value.func)] = node.lineno
    lines, ends = code.splitlines(), [*starts.values(), None][1:]
    found = {}
    for (name, start), end in zip(starts.items(), ends, strict=True):
        text = "\n".join(lines[start - 1 : end and end - 1]).rstrip()
        found[name] = SECTION.sub("", text).rstrip().split("\n")
    return found


def first_line(function: ast.FunctionDef) -> int:
    return min(node.lineno for node in (function, *function.decorator_list))


def hunks(script: str) -> dict[str, list[str]]:
    """By function, in the script's order, each hunk of what has changed since the step before.

    A function that is gone stands where it stood, after the one that came before it.
    """
    old, new = parts(STEPS[script]), parts(script)
    names = list(new)
    for before, name in zip([None, *old], old, strict=False):
        if name not in names:
            names.insert(names.index(before) + 1, name)
    found = {}
    for name in names:
        texts = difference(old.get(name, []), new.get(name, []))
        if name == "imports":  # all that there is to say about them is what they are for
            texts = ["@@\n".join(texts)] if texts else []
        if texts:
            found[name] = texts
    return found


def difference(old: list[str], new: list[str]) -> list[str]:
    """The hunks between the lines of two functions. What changes in one statement is in one."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    spans = (statements(old), statements(new))
    opcodes = matcher.get_opcodes()
    hunks, lines = [], []
    for number, (kind, i, i_end, j, j_end) in enumerate(opcodes):
        if kind != "equal":
            lines += [f"-{line}" for line in old[i:i_end]] + [f"+{line}" for line in new[j:j_end]]
            continue
        equal = [f" {line}" for line in old[i:i_end]]
        first, last = number == 0, number == len(opcodes) - 1
        gaps = ((i, i_end), (j, j_end))
        inside = any(
            begin < start and stop < end
            for (start, stop), each in zip(gaps, spans, strict=True)
            for begin, end in each
        )
        if not first and not last and (inside or len(equal) <= 2 * CONTEXT):
            lines += equal
            continue
        if not first:
            hunks.append(lines + equal[:CONTEXT])
        lines = [] if last else equal[-CONTEXT:]
    if lines:
        hunks.append(lines)
    return ["".join(f"{line.rstrip()}\n" for line in hunk) for hunk in hunks]


def statements(lines: list[str]) -> list[tuple[int, int]]:
    """Where each statement without a body, or the head of one with a body, begins and ends."""
    try:
        tree = ast.parse(textwrap.dedent("\n".join(lines)))
    except SyntaxError:  # a class's first line
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    ends = [node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno for node in nodes]
    return [(node.lineno - 1, end) for node, end in zip(nodes, ends, strict=True)]


def counts(script: str) -> tuple[int, int]:
    """How many lines go and how many come, in all hunks of the step."""
    lines = "".join(chain(*hunks(script).values())).splitlines()
    return tuple(sum(line.startswith(sign) for line in lines) for sign in "-+")


def update(script: str, page: str) -> tuple[str, list[str]]:
    """This script's page with the hunks as they are now, and what does not match."""
    wrong, at = [], [match.start() for match in re.finditer(r"^##+ |\Z", page, re.M)]
    sections = [page[start:end] for start, end in zip([0, *at], at, strict=False)]
    wanted, seen = hunks(script), []
    text = "{} lines go and {} come".format(*counts(script))
    sections[0], number = COUNTS.subn(text, sections[0])
    if number != 1 or not page.startswith(f"# From {STEPS[script]} to {script}\n"):
        wrong.append("it says nowhere how many lines go and come, from which script to which")
    for i, section in enumerate(sections):
        if heading := HEADING.match(section):
            name = heading[1]
            seen.append(name)
            texts, blocks = wanted.get(name, []), section.split("```diff\n")
            for number, text in enumerate(texts[len(blocks) - 1 :], start=len(blocks)):
                wrong.append(f"{name}: hunk {number} has no sentence\n{text}")
            for sentence in blocks[len(texts) : -1]:
                wrong.append(f"{name}: this has no hunk:{sentence.split('```')[-1]}")
            if not texts and len(blocks) == 1:
                wrong.append(f"{name} has not changed and has a heading")
            if len(blocks) - 1 == len(texts):
                rest = [block.split("```", 1)[-1] for block in blocks]
                pairs = zip_longest(texts, rest[1:])
                sections[i] = blocks[0] + "".join(f"```diff\n{t}```{r}" for t, r in pairs)
    for name in (name for name in wanted if name not in seen):
        wrong.append(f"{name} has changed and has no heading\n{''.join(wanted[name])}")
    if not wrong:
        moved = [name for name, place in zip(seen, wanted, strict=False) if name != place]
        wrong += [f"{name}: the scripts have another order" for name in moved[:1]]
    return "".join(sections), wrong


if __name__ == "__main__":
    complaints = []
    for script in STEPS:
        text, wrong = update(script, page(script).read_text())
        complaints += [f"{page(script).name} is as it was: {line}" for line in wrong]
        if not wrong:
            page(script).write_text(text)
    if complaints:
        sys.exit("\n".join(complaints))
