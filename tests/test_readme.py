"""README, its Chinese page and docs/ fit the scripts and the tests."""

import difflib
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import hosts
from helpers.jobs import ROOT, SCRIPTS, epochs
from torch.distributed.run import get_args_parser
from torch.utils.data import DataLoader

from common.loader import loader_options

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
CODE = "".join((ROOT / script).read_text() for script in SCRIPTS)
README, REFERENCE = ((ROOT / page).read_text() for page in ("README.md", "docs/reference.md"))
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


PROGRAMS = table(README, r"you want \| take \| lines")
LAUNCH = "python -m torch.distributed.launch --nproc_per_node=2 ddp_torchrun.py"
COMMANDS = [*(row[-1].strip("`").removesuffix(" 50 10") for row in PROGRAMS), LAUNCH]


def test_the_table_of_programs_and_the_commands_for_two_nodes():
    named = [re.search(r"\((.*?\.py)\)", program)[1] for _, program, *_ in PROGRAMS]
    assert {*SCRIPTS} < {*named} and len(named) == len({*named})
    for name, (_, _, lines, minutes, _, command) in zip(named, PROGRAMS, strict=True):
        assert f" {name}" in command and int(minutes) > 0
        assert int(lines) == len((ROOT / name).read_text().splitlines()), name
    first, second = re.findall(r"^torchrun .*--node_rank.*?(?=  )", README, re.M)
    assert second == first.replace("--node_rank=0", "--node_rank=1")


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


@pytest.mark.slow("traces a ResNet-18")
def test_the_picture_of_a_step(shell, tmp_path):
    folder = tmp_path / "docs" / "programs"
    folder.mkdir(parents=True)
    program = (ROOT / "docs/programs/step.py").read_text()
    (folder / "step.py").write_text(program.replace("STEPS = 30", "STEPS = 4"))
    shell(re.search(r"torchrun .*?/step.py", program)[0] + " step.svg")
    labels = re.findall(r"> ?([\w ]+)</text>", (tmp_path / "step.svg").read_text())
    assert labels.count("backward") == 3 and "bucket 1" in labels  # two bars and the legend


def places(text: str) -> list[str]:
    """The function of each line; "" for a constant, which stands between two of them."""
    found = []
    for part in text.split("\n\n\n"):
        name = re.search(r"^def (\w+)", part, re.M)
        other = "the main guard" if "__name__" in part else "" if found else "the imports"
        found += [name[1] if name else other] * (part.count("\n") + 3)
    return found


def test_the_lines_that_steps_quotes_are_in_the_diffs():
    """Below a line of `@@`, they are in the function that it names."""
    _, *sections = (ROOT / "docs" / "steps.md").read_text().split("\n## ")
    assert len(sections) == len(SCRIPTS) - 1 and min(s.count("```diff") for s in sections) > 2
    for section in sections:
        scripts = re.findall(r"`(\w+\.py)`", section.splitlines()[0])
        old, new = ((ROOT / script).read_text() for script in scripts)
        where = {"-": iter(places(old)), "+": iter(places(new))}
        changes = []  # each line of both scripts, and its function
        diff = difflib.unified_diff(old.splitlines(), new.splitlines(), n=10_000, lineterm="")
        for line in [*diff][3:]:
            for sign in line[0].replace(" ", "-+"):
                changes.append((line[0] + line[1:].strip(), next(where[sign])))
        for block in re.findall(r"```diff\n(.*?)```", section, re.S):
            function = None
            for line in block.splitlines():
                if line.startswith("@@ "):
                    function = line[3:]
                else:
                    quoted = line[0] + line[1:].strip()
                    found = {place for change, place in changes if change == quoted}
                    assert found and (not function or {function, ""} & found), (function, line)


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


class Epochs(list):
    def __getitem__(self, index):
        return int(self.epoch)


@pytest.mark.slow("starts a loader's worker, which imports torch")
def test_workers_see_an_epoch_in_the_tensor_that_reference_shows():
    assert "self.epoch = torch.zeros(1, dtype=torch.long).share_memory_()" in REFERENCE
    data = Epochs([None])
    data.epoch = torch.zeros(1, dtype=torch.long).share_memory_()
    loader = DataLoader(data, **loader_options("cpu", 1))
    for epoch in range(2):
        data.epoch.fill_(epoch)
        assert [int(batch) for batch in loader] == [epoch]


def test_what_may_be_deleted_is_there():
    for construct, scripts, *_ in table(REFERENCE, "construct"):
        for script in SCRIPTS:
            if (script in scripts) != scripts.startswith("all"):
                for piece in re.findall(r"(?<!write )`([^`]+)`", construct):
                    assert piece in (ROOT / script).read_text(), f"{piece} is not in {script}"


def test_every_mark_is_in_the_table_and_in_the_list_of_make_it_yours():
    marks = {*re.findall(r"# (your \w+)", CODE)}
    assert {mark.strip("`") for mark, _ in table(REFERENCE, "mark")} == marks
    section = README.split("\n## Make it yours\n")[1].split("\n## ")[0]
    assert {*re.findall(r"`(your \w+)`", section)} == marks


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
def test_links_lead_somewhere_and_lines_are_what_they_seem(page):
    text = FENCE.sub("", page.read_text())
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in slugs(target), link
    for before, line in itertools.pairwise(text.splitlines()):
        if re.match(r"[-+*] |1\. ", line):  # not a list because a sentence was wrapped at `+ 4`
            assert re.match(r"$| |<|[-+*] |1\. ", before), line


def test_messages_are_those_of_the_scripts_and_each_stands_in_one_table():
    fails = README.split("\n## When it fails\n")[1].split("\n## ")[0]
    pages = [fails, *((ROOT / "docs" / page).read_text() for page in ("errors.md", "multinode.md"))]
    cells = [" ".join(re.findall(r"^\| ([^|]*) \|", page, re.M)) for page in pages]
    for one, other in itertools.combinations([{*re.findall("`[^`]+`", c)} for c in cells], 2):
        assert len(one) > 5 and not one & other
    pieces = (
        "samples: give one each|a restart may hang|was made with|was saved within an epoch|.old|"
        "processes need as many devices|start it with torchrun|[rank |weights are NaN or infinite|"
        "snapshot's epoch|snapshot's weights|train_size|on rank 0, and|: use torchrun with ddp_"
    )
    for piece in pieces.split("|"):
        assert piece in "".join(cells) and piece in CODE, piece


def test_the_chinese_page_has_the_same_code_links_and_numbers():
    """In each section, but in any order. It ends before "When it fails"."""
    found = []
    for text in (README, (ROOT / "README.zh-CN.md").read_text()):
        text = text.replace(".zh-CN.md", ".md").replace("](README.md#", "](#")
        text = re.sub(r"(\]\(|README.md|your_loop.md)#[^)]*", r"\1", text)  # translated headings
        code = re.compile(r"`[^`]+`|\]\([^)]*\)|\d+(?:[.,]\d+)*%?")
        sections = FENCE.sub("", text).split("\n## ")
        found.append([FENCE.findall(text), *(sorted(code.findall(part)) for part in sections)])
    english, chinese = found
    assert len(chinese) > 7 and chinese[:-1] == english[: len(chinese) - 1]
