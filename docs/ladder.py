"""The diffs of ladder.md: what each step of the ladder changes, function by function.

    python docs/ladder.py    put the hunks and their numbers of lines into ladder.md

The headings and the sentences are ladder.md's own: edit them there. Under the heading of a function
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

PAGE = Path(__file__).with_suffix(".md")
ROOT = PAGE.parent.parent
STEPS = {  # each script, and the one that it grew from
    "data_parallel.py": "single_gpu.py",
    "ddp_spawn.py": "single_gpu.py",
    "ddp_torchrun.py": "ddp_spawn.py",
    "multinode.py": "ddp_torchrun.py",
}
HEADING = re.compile(r"### (\w+\.py): `(.+)`")
SECTION = re.compile(r"^ *# --- .* ---$", re.M)  # a heading in a script
COUNTS = re.compile(r"\d+ lines go and \d+ come")
CONTEXT = 1  # lines before and after a change


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


def update(page: str) -> tuple[str, list[str]]:
    """The page with the hunks as they are now, and what does not match."""
    wrong, at = [], [match.start() for match in re.finditer(r"^##+ |\Z", page, re.M)]
    sections = [page[start:end] for start, end in zip([0, *at], at, strict=False)]
    wanted = {(script, name): texts for script in STEPS for name, texts in hunks(script).items()}
    seen, script = [], None
    for i, section in enumerate(sections):
        if step := re.match(r"## From (\w+\.py) to (\w+\.py)\n", section):
            script = step[2]
            text = "{} lines go and {} come".format(*counts(script))
            sections[i], number = COUNTS.subn(text, section)
            if number != 1 or STEPS[script] != step[1]:
                wrong.append(f"{step[0][3:-1]}: it says nowhere how many lines go and come")
        elif heading := HEADING.match(section):
            key = heading.groups()
            seen.append(key)
            texts, blocks = wanted.get(key, []), section.split("```diff\n")
            for number, text in enumerate(texts[len(blocks) - 1 :], start=len(blocks)):
                wrong.append(f"{key[0]}: {key[1]}: hunk {number} has no sentence\n{text}")
            for sentence in blocks[len(texts) : -1]:
                wrong.append(f"{key[0]}: {key[1]}: this has no hunk:{sentence.split('```')[-1]}")
            if not texts and len(blocks) == 1:
                wrong.append(f"{key[0]}: {key[1]} has not changed and has a heading")
            if len(blocks) - 1 == len(texts):
                rest = [block.split("```", 1)[-1] for block in blocks]
                pairs = zip_longest(texts, rest[1:])
                sections[i] = blocks[0] + "".join(f"```diff\n{t}```{r}" for t, r in pairs)
    for key in (key for key in wanted if key not in seen):
        wrong.append(f"{key[0]}: {key[1]} has changed and has no heading\n{''.join(wanted[key])}")
    if not wrong:
        moved = [key for key, place in zip(seen, wanted, strict=False) if key != place]
        wrong += [": ".join(key) + ": the scripts have another order" for key in moved[:1]]
    return "".join(sections), wrong


if __name__ == "__main__":
    page, wrong = update(PAGE.read_text())
    if wrong:
        sys.exit("\n".join(["ladder.md is as it was:", *wrong]))
    PAGE.write_text(page)
