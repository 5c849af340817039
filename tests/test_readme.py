"""README, the Chinese pages, docs/steps.md and docs/reference.md fit the scripts and the tests."""

import difflib
import re
import sys
from pathlib import Path

import pytest
from helpers import hosts
from helpers.jobs import ROOT, SCRIPTS, epochs
from torch.distributed.run import get_args_parser

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
README, REFERENCE = ((ROOT / page).read_text() for page in ("README.md", "docs/reference.md"))
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """shell(command) -> its output, in a folder with the scripts."""
    for name in ("common", *SCRIPTS):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    return lambda command: hosts.run("bash", "-ec", command)


def table(text: str, header: str) -> list[list[str]]:
    """The cells of a table's rows, without its header."""
    (rows,) = re.findall(rf"^\| {header} \|.*\n\|[- |]*\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()]


COMMANDS = [row[1].strip("`").removesuffix(" 50 10") for row in table(README, "you have")]
ON_ONE_NODE = [c for c in COMMANDS if "--node_rank" not in c and "sbatch" not in c]
LAUNCH = "python -m torch.distributed.launch --nproc_per_node=2 ddp_torchrun.py"


def test_there_is_a_command_for_each_script():
    first, second = (command for command in COMMANDS if "--node_rank" in command)
    assert second == first.replace("--node_rank=0", "--node_rank=1")  # as in test_multinode.py
    assert [re.search(r"\w+\.py", command)[0] for command in ON_ONE_NODE] == list(SCRIPTS)


@pytest.mark.slow("real command lines")
@pytest.mark.parametrize("command", [*ON_ONE_NODE, LAUNCH])
def test_the_command_runs(shell, fashion, tmp_path, command):
    command = command.replace("=gpu", "=2")  # as README says for a CPU
    alone = f"file://{tmp_path}/store --rank 0 --world-size 1"
    command = re.sub(r"tcp://.*--world-size 2", alone, command)
    assert len(epochs(shell(f"{command} 1 1 {' '.join(fashion(100, 10))}"))) == 1


@pytest.mark.slow("real command lines, one after the other")
def test_the_commands_of_reference(shell, fashion):
    page = REFERENCE.replace("--device cpu", f"--device cpu {' '.join(fashion(100, 10))}")
    resumed, restarted = re.findall(r"```bash\n(.*?)```", page, re.S)
    assert [line["epoch"] for line in epochs(shell(resumed))] == [0, 1, 2]
    assert [line["epoch"] for line in epochs(shell(restarted))] == [3, 4]


@pytest.mark.slow("traces a ResNet-18")
def test_the_picture_of_a_step(shell, tmp_path):
    program = (ROOT / "docs" / "step.py").read_text().replace("STEPS = 30", "STEPS = 4")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "step.py").write_text(program)
    shell(re.search(r"`(torchrun [^`]*docs/step.py)`", README)[1] + " step.svg")
    labels = re.findall(r"> ?([\w ]+)</text>", (tmp_path / "step.svg").read_text())
    assert labels.count("backward") == 3 and "bucket 1" in labels  # two bars and the legend


def places(text: str) -> list[str]:
    """The function of each line, with its class."""
    found, place = [], {0: "the imports"}
    for line in text.splitlines():
        if named := re.match(r"( *)(?:(?:def|class) (\w+)|if (?=__name__))", line):
            depth = len(named[1])
            place = {d: name for d, name in place.items() if d < depth}
            place[depth] = named[2] or "the main guard"
        found.append(".".join(place.values()))
    return found


def test_the_lines_that_steps_quotes_are_in_the_diffs():
    """Without a line of `@@` between them, they are near to each other, and in this order."""
    _, *sections = (ROOT / "docs" / "steps.md").read_text().split("\n## ")
    assert len(sections) == len(SCRIPTS) - 1
    for section in sections:
        scripts = re.findall(r"`(\w+\.py)`", section.splitlines()[0])
        old, new = ((ROOT / script).read_text() for script in scripts)
        where = {"-": iter(places(old)), "+": iter(places(new))}
        changes = []  # each line of both scripts, and its function
        diff = difflib.unified_diff(old.splitlines(), new.splitlines(), n=10_000, lineterm="")
        for line in [*diff][3:]:
            named = {next(where[sign]) for sign in line[0].replace(" ", "-+")}
            changes.append((line[0] + line[1:].strip(), named))
        blocks = re.findall(r"```diff\n(.*?)```", section, re.S)
        assert len(blocks) > 2
        for block in blocks:
            near = range(len(changes))
            for line in block.splitlines():
                if line.startswith("@@ "):
                    near, function = range(len(changes)), line[3:]
                    continue
                quoted = line[0] + line[1:].strip()
                (at, *_) = [n for n in near if changes[n][0] == quoted] or [None]
                assert at is not None, f"{scripts[1]} has not this line, or not here: {line}"
                assert "\n@@" not in f"\n{block}" or function in changes[at][1], (function, line)
                near = range(at + 1, min(at + 6, len(changes)))


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


def test_what_may_be_deleted_is_there():
    for construct, scripts, *_ in table(REFERENCE, "construct"):
        for script in SCRIPTS:
            if (script in scripts) != scripts.startswith("all"):
                text = (ROOT / script).read_text()
                for piece in re.findall(r"(?<!write )`([^`]+)`", construct):
                    assert piece in text, f"{piece} is not in {script}"


def test_every_mark_is_in_the_table_and_in_the_list_of_make_it_yours():
    marks = {
        *re.findall(r"# ((?:load )?your \w+)", "".join((ROOT / s).read_text() for s in SCRIPTS))
    }
    assert {mark.strip("`") for mark, _ in table(REFERENCE, "mark")} == marks
    section = README.split("\n## Make it yours\n")[1].split("\n## ")[0]
    assert {*re.findall(r"`((?:load )?your \w+)`", section)} == marks


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


@pytest.mark.parametrize("page", ["README", "docs/your_loop"])
def test_a_chinese_page_has_the_same_code_links_and_numbers(page):
    """In each section, but in any order."""
    english, chinese = [], []
    for language, found in (("", english), (".zh-CN", chinese)):
        text = (ROOT / f"{page}{language}.md").read_text()
        text = text.replace(".zh-CN.md", ".md")
        text = re.sub(r"(\]\(|README.md|your_loop.md)#[^)]*", r"\1", text)  # translated headings
        found += FENCE.findall(text)
        for section in FENCE.sub("", text).split("\n## "):
            found.append(sorted(re.findall(r"`[^`]+`|\]\([^)]*\)|\d+(?:[.,]\d+)*%?", section)))
    assert english == chinese
