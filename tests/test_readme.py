"""README, its Chinese version, docs/steps.md and docs/reference.md fit the scripts and the tests.

.ci/run runs README's two set-up commands.
"""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT, SCRIPTS, epochs
from torch.distributed.run import get_args_parser

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
README, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
STEPS = (ROOT / "docs" / "steps.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


@pytest.fixture
def shell(tmp_path):
    """shell(command) -> its output, in a folder with the scripts."""
    for name in ("common", "docs", *SCRIPTS):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": path}

    def shell(command: str) -> str:
        command = ["bash", "-ec", command]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return shell


def table(text: str, header: str) -> list[list[str]]:
    """The cells of a table's rows, without its header."""
    (rows,) = re.findall(rf"^\| {header} \|.*\n\|[- |]*\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()]


def test_what_the_first_command_prints(run, fashion):
    """The lines that README shows, but for the numbers."""
    output = run("ddp_spawn.py", 1, *fashion(100, 10))
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.S)
    shown, printed = (sorted(re.sub(r"\d+(\.\d+)?", "N", t).splitlines()) for t in (shown, output))
    assert len(shown) == 6 and {*shown} <= {*printed}


@pytest.mark.slow("real command lines, one after the other")
def test_the_commands_run(shell, tmp_path):
    commands = [row[1].strip("`").removesuffix(" 50 10") for row in table(README, "you have")]
    first, second = (command for command in commands if "--node_rank" in command)
    assert second == first.replace("--node_rank=0", "--node_rank=1")  # test_torchrun.py runs these
    commands = [c for c in commands if "--node_rank" not in c and "sbatch" not in c]
    assert [re.search(r"\w+\.py", command)[0] for command in commands] == list(SCRIPTS)
    for command in commands:
        command = command.replace("=gpu", "=2")  # as README says for a CPU
        alone = f"file://{tmp_path}/store --rank 0 --world-size 1"
        command = re.sub(r"tcp://.*--world-size 2", alone, command)
        assert len(epochs(shell(f"{command} 1 1 --model mlp"))) == 1


@pytest.mark.slow("real command lines, one after the other")
def test_the_commands_of_reference_and_the_picture(shell, tmp_path):
    resumed, restarted = re.findall(r"```bash\n(.*?)```", REFERENCE, re.S)
    assert [line["epoch"] for line in epochs(shell(resumed))] == [0, 1, 2]
    assert [line["epoch"] for line in epochs(shell(restarted))] == [3, 4]
    shell(re.search(r"`(torchrun [^`]*docs/step.py)`", README)[1] + " step.svg")
    labels = re.findall(r"> ?([\w ]+)</text>", (tmp_path / "step.svg").read_text())
    assert labels.count("backward") == 3 and "bucket 1" in labels  # two bars and the legend


def test_the_lines_that_steps_quotes_are_in_the_diffs():
    sections = re.split(r"^## ", STEPS, flags=re.M)[1:]
    assert len(sections) == len(SCRIPTS) - 1
    for section in sections:
        scripts = re.findall(r"`(\w+\.py)`", section.splitlines()[0])
        old, new = ((ROOT / script).read_text().splitlines() for script in scripts)
        changes = {line[:1] + line[1:].strip() for line in difflib.unified_diff(old, new, n=0)}
        quoted = "".join(re.findall(r"```diff\n(.*?)```", section, re.S)).splitlines()
        assert len(quoted) > 3
        assert not [line for line in quoted if line[:1] + line[1:].strip() not in changes]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_options_of_reference_and_of_the_docstring(script):
    _, docstring, code = (ROOT / script).read_text().split('"""', 2)
    has = {*re.findall(r'add\("([\w-]+)"', code)} - {"--local-rank"}  # which is hidden
    listed = set()
    for options, *_, scripts in table(REFERENCE, "option"):
        named = re.findall(r"`(\w+\.py)`", scripts)
        if (script in named) != ("all" in scripts):
            listed.update(re.findall(r"`([\w-]+)`", options))
    assert listed == has, f"docs/reference.md does not fit {script}: {listed ^ has}"
    torchruns = {o for action in get_args_parser()._actions for o in action.option_strings}
    assert {*re.findall(r"--[a-z][\w-]+", docstring)} <= has | torchruns | {"--help"}


def test_every_promise_names_tests_that_exist():
    rows = table(REFERENCE, "promise")
    assert len(rows) > 8
    for promise, shown in rows:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", shown)
        assert named, promise
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / file).read_text(), name


def slugs(page: Path) -> set[str]:
    """What a page's headings are called in a link."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", FENCE.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in slugs(target), link


def kept(section: str) -> list:
    """What a translation leaves as it is, in any order."""
    section = section.replace(".zh-CN.md", ".md")
    links = re.findall(r"\]\(([^)]*)\)", section)
    words = re.findall(r"`[^`]+`", section)
    numbers = re.findall(r"\d+(?:[.,]\d+)*%?", re.sub(r"`[^`]+`|\]\([^)]*\)", "", section))
    return [sorted(links), sorted(words), sorted(numbers)]


def test_the_chinese_readme_has_the_same_commands_links_and_numbers():
    assert FENCE.findall(README) == FENCE.findall(CHINESE)
    english, chinese = (re.split(r"^## ", FENCE.sub("", t), flags=re.M) for t in (README, CHINESE))
    for pair in zip(english[1:], chinese[1:], strict=True):
        assert kept(pair[0]) == kept(pair[1])
