"""docs/ladder/: its hunks are those of the scripts, each has its sentence, its links lead on."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
import ladder
from ladder import ROOT

INDEX = ladder.INDEX.read_text()
PAGES = {script: ladder.page(script).read_text() for script in ladder.STEPS}
HUNK = re.compile(r"^```diff\n((?:[-+ ].*\n|\n|@@\n)+)```$", re.M)
each_page = pytest.mark.parametrize("script", PAGES)


def anchors(page: str) -> list[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^##+ (.+)$", page, re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@each_page
def test_the_page_is_what_the_command_would_write(script):
    page, wrong = ladder.update(script, PAGES[script])
    assert not wrong, "\n".join(wrong)
    assert page == PAGES[script], "stale: python docs/ladder.py"


@each_page
def test_all_hunks_are_there_in_the_order_of_the_script(script):
    wanted = [hunk for hunks in ladder.hunks(script).values() for hunk in hunks]
    assert len(wanted) > 5 and HUNK.findall(PAGES[script]) == wanted
    assert PAGES[script].count("```diff\n") == len(wanted)


@each_page
def test_the_hunks_make_the_new_script_of_the_old_one(script):
    def lines(script: str) -> Counter[str]:
        code = (ROOT / script).read_text().split('"""\n', maxsplit=1)[1]
        return Counter(line for line in code.splitlines() if line)

    changed = "".join(HUNK.findall(PAGES[script])).splitlines()
    gone = [line[1:] for line in changed if line.startswith("-")]
    come = [line[1:] for line in changed if line.startswith("+")]
    result = lines(ladder.STEPS[script])
    result.subtract(line for line in gone if line)
    result.update(line for line in come if line)
    assert +result == lines(script) and min(result.values()) >= 0
    assert f"{len(gone)} lines go and {len(come)} come." in PAGES[script]


@each_page
def test_it_opens_with_the_lines_that_matter(script):
    (key,) = re.findall(
        r"^## The lines that matter\n\n```diff key\n(.*?)```", PAGES[script], re.M | re.S
    )
    hunks = ladder.hunks(script)
    changed = 0
    for name, lines in re.findall(r"^@@ (.+)\n((?:[-+].*\n)+)", key, re.M):
        rest = "".join(hunks[name]).splitlines()
        for line in lines.splitlines():
            rest = rest[rest.index(line) + 1 :]  # they come in this order
            changed += 1
    assert 4 < changed < 12 and key.count("\n") == changed + key.count("@@")
    assert PAGES[script].index("```diff key") < PAGES[script].index("```diff\n")
    opening = re.split(r"^(?:<details>|## Training)$", PAGES[script], flags=re.M)[0]
    assert opening.count("\n") < 50  # a screen


@each_page
def test_plumbing_is_folded_away(script):
    folded = "".join(re.findall(r"^<details>$.*?^</details>$", PAGES[script], re.M | re.S))
    names = re.findall(r"^### `(.+)`$", folded, re.M)
    assert "parse_args" in names
    shown = {*ladder.hunks(script)} - {*names}
    assert shown <= {
        *(
            f"Trainer.{name}"
            for name in ("__init__", "_run_batch", "_run_epoch", "_evaluate", "train")
        ),
        *("ddp_setup", "loopback_error", "load_train_objs", "main"),
        *("join", "call_the_roll", "wait_while", "choose_device", "spawn"),
    }


def test_every_hunk_has_a_sentence_of_its_own():
    texts = [text for page in PAGES.values() for text in HUNK.split(page)[::2][:-1]]
    before = [text.strip().split("\n\n")[-1] for text in texts]
    for text in before:
        assert re.match(r"[A-Za-z`].*\.\Z", text, re.S), text
    assert len({*before}) == len(before)


def test_what_the_jump_list_names_exists():
    named = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", INDEX)
    assert len(named) > 40
    for script, name in named:
        if (ROOT / script).parent == ROOT:
            assert name in ladder.parts(script), (script, name)
        else:
            code = (ROOT / script).read_text()
            assert re.search(rf"^(def|class) {name}\b", code, re.M), (script, name)


def test_links_lead_to_headings():
    links = re.findall(r"\[`(\w+\.py)` `([\w.]+)`\]\(ladder/(\w+)\.md#([^)]+)\)", INDEX)
    assert len(links) > 40 and len(links) == INDEX.count(".md#")
    for script, name, page, link in links:
        assert script == f"{page}.py" and link == name.lower().replace(".", "")
        assert anchors(PAGES[script]).count(link) == 1, (script, link)
    assert re.findall(r"\]\(ladder/(\w+)\.md\)", INDEX) == [script[:-3] for script in PAGES]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (r"```diff\n", "", "has no sentence"),
        (r"```diff\n", "A sentence.\n\n```diff\n```\n\nAnother.\n\n```diff\n", "has no hunk"),
        (r"### .*\n", "", "has no sentence|has no hunk|has no heading"),
        (r"_settle_buckets`\n", "_unsettle`\n", "has no heading"),
        (r"\n### ", "\n### `prepare_dataloader`\n\n### ", "has not changed"),
        (r"\d+ lines go", "Some lines go", "says nowhere"),
        (r"(### (?:.*\n)+?)(### (?:.*\n)+?)(?=###)", r"\2\1", "have another order"),
    ],
)
def test_the_command_says_what_does_not_match(old, new, complaint):
    page, count = re.subn(old, new, PAGES["ddp_spawn.py"], count=1)
    _, wrong = ladder.update("ddp_spawn.py", page)
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
