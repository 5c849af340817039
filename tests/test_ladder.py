"""docs/ladder.md: its hunks are those of the scripts, each has its sentence, its links lead on."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
import ladder
from ladder import ROOT

PAGE = ladder.PAGE.read_text()
TITLE, JUMP_LIST, *STEPS = re.split(r"^(?=## )", PAGE, flags=re.M)
NAMED = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", JUMP_LIST)
HUNK = re.compile(r"^```diff\n((?:[-+ ].*\n|\n|@@\n)+)```$", re.M)


def anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_page_is_what_the_command_would_write():
    page, wrong = ladder.update(PAGE)
    assert not wrong, "\n".join(wrong)
    assert page == PAGE, "stale: python docs/ladder.py"


def test_all_hunks_are_there_in_the_order_of_the_scripts():
    wanted = [
        hunk for script in ladder.STEPS for hunks in ladder.hunks(script).values() for hunk in hunks
    ]
    assert HUNK.findall(PAGE) == wanted
    assert PAGE.count("```diff") == len(wanted)


@pytest.mark.parametrize("step", STEPS, ids=list(ladder.STEPS))
def test_the_hunks_make_the_new_script_of_the_old_one(step):
    def lines(script: str) -> Counter[str]:
        code = (ROOT / script).read_text().split('"""\n', maxsplit=1)[1]
        return Counter(line for line in code.splitlines() if line)

    old, new = re.match(r"## From (\S+) to (\S+)\n", step).groups()
    changed = "".join(HUNK.findall(step)).splitlines()
    gone = [line[1:] for line in changed if line.startswith("-")]
    come = [line[1:] for line in changed if line.startswith("+")]
    result = lines(old)
    result.subtract(line for line in gone if line)
    result.update(line for line in come if line)
    assert +result == lines(new) and min(result.values()) >= 0
    assert f"{len(gone)} lines go and {len(come)} come." in step


def test_every_hunk_has_a_sentence_of_its_own():
    before = [text.strip().split("\n\n")[-1] for text in HUNK.split(PAGE)[::2][:-1]]
    for text in before:
        assert re.match(r"[A-Za-z`].*\.\Z", text, re.S), text
    assert len({*before}) == len(before)


def test_what_the_jump_list_names_exists():
    assert len(NAMED) > len(STEPS)
    for script, name in NAMED:
        if (ROOT / script).parent == ROOT:
            assert name in ladder.parts(script), (script, name)
        else:
            code = (ROOT / script).read_text()
            assert re.search(rf"^(def|class) {name}\b", code, re.M), (script, name)


def test_links_lead_to_headings():
    anchors = [anchor(heading) for heading in re.findall(r"^##+ (.+)$", PAGE, re.M)]
    assert len({*anchors}) == len(anchors)
    links = re.findall(r"\[([^]]+)\]\(#([^)]+)\)", PAGE)
    assert len(links) > len(STEPS) and {link for _, link in links} <= {*anchors}
    for text, link in links:
        if "`" in text:
            assert link == anchor(text.replace("` `", ": "))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (r"```diff\n", "", "has no sentence"),
        (r"```diff\n", "A sentence.\n\n```diff\n```\n\nAnother.\n\n```diff\n", "has no hunk"),
        (r"### .*\n", "", "has no sentence|has no hunk|has no heading"),
        (r"_settle_buckets`\n", "_unsettle`\n", "has no heading"),
        (r"\n### ", "\n### ddp_spawn.py: `prepare_dataloader`\n\n### ", "has not changed"),
        (r"\d+ lines go", "Some lines go", "says nowhere"),
        (r"(### (?:.*\n)+?)(### (?:.*\n)+?)(?=###)", r"\2\1", "have another order"),
    ],
)
def test_the_command_says_what_does_not_match(old, new, complaint):
    page, count = re.subn(old, new, PAGE, count=1)
    _, wrong = ladder.update(page)
    assert count == 1 and re.search(complaint, "\n".join(wrong))


def test_all_scripts_have_one_order_and_the_same_headings():
    """The story first: whoever knows one file finds everything in the next one."""
    names = {script: [*ladder.parts(script)] for script in ("single_gpu.py", *ladder.STEPS)}
    for script, old in ladder.STEPS.items():
        both = [name for name in names[old] if name in names[script]]
        assert both == [name for name in names[script] if name in names[old]]
    story = ["__init__", "_run_batch", "_run_epoch", "_evaluate", "train"]
    for script, found in names.items():
        methods = [name.removeprefix("Trainer.") for name in found if name.startswith("Trainer.")]
        assert methods[: len(story)] == story
        code = (ROOT / script).read_text()
        headings = ("    # --- snapshots and stopping", "# --- setting up", "# --- plumbing")
        assert re.findall(r"^ *# ---.*", code, re.M) == [f"{heading} ---" for heading in headings]
        told = code[code.index("class Trainer:") : code.index(headings[0])]
        assert told.count("\n") < 160  # in one sitting
        last = code.index("    def _load_snapshot"), code.index("def main("), code.index("def log(")
        assert code.index(headings[0]) < last[0] < code.index(headings[1]) < last[1]
        assert last[1] < code.index(headings[2]) < last[2]
