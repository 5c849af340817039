"""Programs with one mistake each, and right ones that look like them: what the doctor says of them.

In programs.txt, the first one is the base of all others, each of which is named after `##`, with
the kind of the one thing that is found in it. `A => B` replaces a text. The lines after `#NAME`
take that place in the base, or those between `#NAME[` and `#]`.
"""

import re
from pathlib import Path

BASE, *PARTS = re.split("^## ", Path(__file__).with_suffix(".txt").read_text(), flags=re.M)


def filled(changes: str) -> str:
    text = BASE
    lines, *slots = re.split("^#", changes, flags=re.M)
    for line in filter(str.strip, lines.splitlines()):
        old, new = line.replace("\\n", "\n").split(" => ")
        assert old in text, line
        text = text.replace(old, new)
    for slot in slots:
        name, _, lines = slot.partition("\n")
        found = re.search(rf"( *)#{name}(\[\n.*?#\])?\n", text, re.S)
        assert found, name
        more = "".join(f"{found[1]}{line}\n" for line in lines.strip().splitlines())
        text = text[: found.start()] + more + text[found.end() :]
    return re.sub(r" *#([A-Z]+\[?|\])\n", "", text)


PROGRAMS: dict[str, tuple[str, str]] = {}  # by name, the program and what is found in it
for part in PARTS:
    title, _, changes = part.partition("\n")
    name, _, kind = title.partition(": ")
    PROGRAMS[name] = filled(changes), kind
