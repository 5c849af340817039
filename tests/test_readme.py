"""README, the Chinese pages, docs/steps.md, reference.md and errors.md fit scripts and tests."""

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
from torch.utils.data import DataLoader, Dataset

from common.loader import worker_options

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


def test_the_table_of_programs():
    named = [re.search(r"\((.*?\.py)\)", program)[1] for _, program, *_ in PROGRAMS]
    assert {*SCRIPTS} < {*named} and len(named) == len({*named})
    for name, (_, _, lines, minutes, _, command) in zip(named, PROGRAMS, strict=True):
        assert f" {name}" in command and int(minutes) > 0
        assert int(lines) == len((ROOT / name).read_text().splitlines()), name


def test_the_commands_for_two_nodes():
    """Other tests run them: test_multinode.py and test_slurm.py."""
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
    program = (ROOT / "docs" / "step.py").read_text().replace("STEPS = 30", "STEPS = 4")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "step.py").write_text(program)
    shell(re.search(r"torchrun .* docs/step.py", program)[0] + " step.svg")
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


class Epochs(Dataset):
    def __init__(self):
        self.epoch = torch.zeros(1, dtype=torch.long).share_memory_()
        self.plain = 0

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return int(self.epoch), self.plain


@pytest.mark.slow("starts a loader's worker, which imports torch")
def test_workers_see_an_epoch_in_the_tensor_that_reference_shows():
    data, seen = Epochs(), []
    assert "torch.zeros(1,dtype=torch.long).share_memory_()" in re.sub(r"\s", "", REFERENCE)
    loader = DataLoader(data, **worker_options(1))
    for epoch in range(2):
        data.epoch.fill_(epoch)
        data.plain = epoch
        seen += [[value.item() for value in values] for values in loader]
    assert seen == [[0, 0], [1, 0]]  # the plain number stays what it was when the worker started


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_of_a_paragraph_becomes_a_list(page):
    """As `16\\n+ 4` does, where a sentence was wrapped."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    for before, line in itertools.pairwise(lines):
        if re.match(r"[-+*] |1\. ", line):
            assert re.match(r"$| |<|[-+*] |1\. ", before), line


def test_the_messages_of_the_scripts_that_are_explained_are_theirs():
    """Each with the piece of a script that prints it."""
    code = "".join((ROOT / script).read_text() for script in SCRIPTS)
    pages = README + (ROOT / "docs" / "errors.md").read_text()
    for message, piece in {
        "a restart may hang": 'error = "a restart may hang',
        "checkpoint.pt was made with --lr 0.01, not 0.1": "was made with --{name} {saved}, not",
        "is now checkpoint.pt.old": "is now {args.snapshot_path}.old",
        "lr is 0.01 on rank 0, and 0.1 on rank 1": " on rank 0, and {other[name]} on rank {rank}",
        "processes are more than 1 devices": " processes are more than {",
        "rank 0 of 1": "[rank {dist.get_rank()} of {dist.get_world_size()}]",
        "snapshot's epoch is 3 on rank 0, and 0 on rank 1": 'loaded = {"snapshot\'s epoch": self',
        "train_size is 1200 on rank 0, and 1000 on rank 1": 'compare_ranks({"train_size": len(',
        "weights are NaN or infinite": "error: weights are NaN or infinite",
        "WORLD_SIZE is 2: use torchrun": "WORLD_SIZE is {os.environ['WORLD_SIZE']}: use torchrun",
    }.items():
        assert f"`{message}" in pages and piece in code, message


CHINESE = sorted(page.name.split(".")[0] for page in PAGES if ".zh-CN." in page.name)


@pytest.mark.parametrize("name", CHINESE)
def test_a_chinese_page_has_the_same_code_links_and_numbers(name):
    """In each section, but in any order. README's Chinese page ends before "When it fails"."""
    english, chinese = [], []
    for language, found in (("", english), (".zh-CN", chinese)):
        (page,) = [page for page in PAGES if page.name == f"{name}{language}.md"]
        text = page.read_text().replace(".zh-CN.md", ".md").replace("](README.md#", "](#")
        text = re.sub(r"(\]\(|README.md|your_loop.md)#[^)]*", r"\1", text)  # translated headings
        sections = FENCE.sub("", text).split("\n## ")
        for section in sections:
            found.append(sorted(re.findall(r"`[^`]+`|\]\([^)]*\)|\d+(?:[.,]\d+)*%?", section)))
        found.insert(0, FENCE.findall(text))
    if name == "README":
        chinese.pop()
        assert len(chinese) > 6
        english = english[: len(chinese)]
    assert english == chinese
