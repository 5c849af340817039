"""README, its Chinese page and docs/ fit the scripts and the tests."""

import re
import sys
from pathlib import Path

import pytest
from helpers import hosts
from helpers.jobs import ROOT, SCRIPTS, epochs
from torch.distributed.run import get_args_parser

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
CODE = "".join((ROOT / script).read_text() for script in SCRIPTS)
README, REFERENCE, PROJECT = (
    (ROOT / page).read_text() for page in ("README.md", "docs/reference.md", "docs/your_project.md")
)
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """shell(command) -> its output, in a folder with the scripts."""
    for name in ("common", *SCRIPTS):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PET_STANDALONE", "1")  # for torchrun 2.11, which has one port for all jobs
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    return lambda command: hosts.run("bash", "-ec", command)


def table(text: str, header: str) -> list[list[str]]:
    """The cells of a table's rows, without its header."""
    (rows,) = re.findall(rf"^\| {header} \|.*\n\|[- |]*\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()]


PROGRAMS = table(README, r"script \| what is new")
LAUNCH = "python -m torch.distributed.launch --nproc_per_node=2 ddp_torchrun.py"
COMMANDS = [*(row[-1].strip("`").removesuffix(" 50 10") for row in PROGRAMS), LAUNCH]


def test_the_table_of_programs():
    named = [re.search(r"\((.*?\.py)\)", program)[1] for program, *_ in PROGRAMS]
    assert named == [*SCRIPTS, "docs/your_loop.py"]


def test_the_change_that_readme_quotes_makes_your_loop():
    """A line with - is that of a loop for one device, so it is in neither."""
    (change,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    code = (ROOT / "docs" / "your_loop.py").read_text().splitlines()
    for line in change.splitlines():
        assert (line[1:] in code) is (line[0] in " +"), line


@pytest.mark.slow("real command lines")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(shell, fashion, tmp_path, command):
    command = command.replace("=gpu", "=2")  # as README says for a CPU
    if "docs/" in command:  # a program without options
        (tmp_path / "docs").symlink_to(ROOT / "docs")
        assert "\nepoch 4: " in shell(command)
        return
    alone = f"file://{tmp_path}/store --rank 0 --world-size 1"
    command = re.sub(r"tcp://.*--world-size 2", alone, command)
    assert len(epochs(shell(f"{command} 1 1 {' '.join(fashion(100, 10))}"))) == 1


@pytest.mark.slow("real command lines, one after the other")
@pytest.mark.timeout(600)
def test_the_commands_of_reference(shell, fashion):
    page = REFERENCE.replace("--device cpu", f"--device cpu {' '.join(fashion(100, 10))}")
    resumed, restarted = re.findall(r"```bash\n(.*?)```", page, re.S)
    assert [line["epoch"] for line in epochs(shell(resumed))] == [0, 1, 2]
    assert [line["epoch"] for line in epochs(shell(restarted))] == [3, 4]


def test_the_lines_that_steps_quotes_are_in_the_scripts():
    """Those with - in the first script of a step, those with + in the second."""
    _, *sections = (ROOT / "docs" / "steps.md").read_text().split("\n## ")
    assert [section.count("```diff") for section in sections] == [2, 6, 5, 2]
    for section in sections:
        scripts = re.findall(r"`(\w+\.py)`", section.splitlines()[0])
        old, new = (map(str.strip, (ROOT / name).read_text().splitlines()) for name in scripts)
        found = {"-": {*old}, "+": {*new}}
        for block in re.findall(r"```diff\n(.*?)```", section, re.S):
            for line in block.splitlines():
                assert line[0] not in found or line[1:].strip() in found[line[0]], line


def test_the_lines_of_the_table_of_your_project_are_in_ddp_torchrun():
    rows = table(PROJECT, "what it adds")
    code = (ROOT / "ddp_torchrun.py").read_text()
    assert [line for *_, line in rows if line.strip("`") not in code] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_options_of_reference_and_of_the_docstring(script):
    _, docstring, code = (ROOT / script).read_text().split('"""', 2)
    has = {*re.findall(r'add\("([\w-]+)"', code)} - {"--local-rank"}  # which is hidden
    listed = set()
    for options, *_, scripts in table(REFERENCE, "option"):
        if (script in scripts) != scripts.startswith("all"):
            listed.update(re.findall(r"`([\w-]+)`", options))
    assert listed == has, f"docs/reference.md does not fit {script}: {listed ^ has}"
    torchruns = {o for action in get_args_parser()._actions for o in action.option_strings}
    assert {*re.findall(r"--[a-z][\w-]+", docstring)} <= has | torchruns | {"--help"}


def test_every_mark_is_in_the_steps_and_in_the_table_of_your_project():
    marks = {*re.findall(r"# (your \w+)", CODE)}
    assert {mark.strip("`") for mark, _ in table(PROJECT, "mark")} == marks
    steps = PROJECT.split("\n## ")[0]
    assert {*re.findall(r"`(your \w+)`", steps)} == marks


def test_every_promise_names_tests_that_exist():
    for promise, shown in table(REFERENCE, "promise"):
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


def test_the_messages_of_the_scripts_are_in_the_tables_of_errors():
    pages = [README, *((ROOT / f"docs/{name}.md").read_text() for name in ("errors", "multinode"))]
    messages = """samples: give one each|a restart may hang|was made with|saved within an epoch|
    processes need as many devices|start it with torchrun|weights are NaN or infinite|train_size|
    snapshot's epoch|snapshot's weights|on rank 0, and|: use torchrun with ddp_"""
    for message in messages.replace("\n    ", "").split("|"):
        assert message in "".join(pages) and message in CODE, message


def test_the_chinese_page_has_the_same_code_links_and_numbers():
    """In each section that is translated, but in any order."""
    found = []
    for name, rest in (("README.md", "\n## When it fails"), ("README.zh-CN.md", "\n## 更多内容")):
        text = (ROOT / name).read_text().split(rest)[0].replace(".zh-CN.md", ".md")
        text = re.sub(r"(\]\(|your_loop.md)#[^)]*", r"\1", text)  # translated headings
        code = re.compile(r"`[^`]+`|\]\([^)]*\)|\d+(?:[.,]\d+)*%?")
        sections = FENCE.sub("", text).split("\n## ")
        found.append([FENCE.findall(text), *(sorted(code.findall(part)) for part in sections)])
    assert len(found[0]) > 6 and found[0] == found[1]
