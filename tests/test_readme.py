"""README, its Chinese page and docs/ fit the scripts, and their commands run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import hosts
from helpers.jobs import ROOT, SCRIPTS, epochs
from helpers.ranks import train
from torch.distributed.run import get_args_parser

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
LONG_RUN = "recipes/long_run.py"
README, CHINESE, REFERENCE = (
    (ROOT / page).read_text() for page in ("README.md", "README.zh-CN.md", "docs/reference.md")
)
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """shell(command) -> its output, in a folder with the scripts."""
    for name in ("common", "docs", "recipes", *SCRIPTS):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    return lambda command: hosts.run("bash", "-ec", command)


def table(text: str, header: str) -> list[list[str]]:
    """The cells of a table's rows, without its header."""
    (rows,) = re.findall(rf"^\| {header} \|.*\n\|[- |]*\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()]


def test_the_change_that_readme_quotes_makes_your_loop():
    """A line with - is that of a loop for one device, so it is in neither."""
    (change,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    code = (ROOT / "docs" / "your_loop.py").read_text().splitlines()
    for line in change.splitlines():
        assert (line[1:] in code) is (line[0] in " +"), line


@pytest.mark.slow("a real command line")
def test_your_loop_runs(shell):
    """The others of README's table: test_training.py."""
    (command,) = re.findall(r"`(.* docs/your_loop.py)`", README)
    assert "\nepoch 4: " in shell(command.replace("=gpu", "=2"))


@pytest.mark.slow("a real command line")
def test_the_doctor_says_what_readme_quotes(shell, tmp_path):
    code = (ROOT / "docs" / "your_loop.py").read_text().splitlines(keepends=True)
    (tmp_path / "train.py").write_text("".join(line for line in code if "set_epoch" not in line))
    (command,) = re.findall(r"^python PATH/doctor .*$", README, re.M)
    (quoted,) = re.findall(r"^FOUND .*$", README, re.M)
    assert f"\n{quoted}\n" in shell(f"{command.replace('PATH', str(ROOT))} || [ $? = 1 ]")


def test_the_commands_of_reference(tmp_path, fashion):
    """Four ranks train, two go on, and then the recipe does."""
    commands = re.findall(r"^(python|torchrun .*) (\S+\.py) (\d.*)$", REFERENCE, re.M)
    trained = []
    for launch, script, words in commands:
        (processes,) = re.findall(r"--nproc[-_]per[-_]node[ =](\d)", f"{launch} {words}")
        text = train(tmp_path, script, int(processes), *words.split(), *fashion(96, 10))
        trained.append((script, processes, [line["epoch"] for line in epochs(text)]))
    spawned = [("ddp_spawn.py", "4", [0, 1]), ("ddp_spawn.py", "2", [2])]
    assert trained == [*spawned, (LONG_RUN, "2", [3])]


def test_the_lines_that_steps_quotes_are_in_the_scripts():
    """Those with - in the first script of a step, those with + in the second."""
    _, *sections = (ROOT / "docs" / "steps.md").read_text().split("\n## ")
    assert [section.count("```diff") for section in sections] == [1, 6, 1, 1]
    for section in sections:
        scripts = re.findall(r"`(\w+\.py)`", section.splitlines()[0])
        old, new = (map(str.strip, (ROOT / name).read_text().splitlines()) for name in scripts)
        found = {"-": {*old}, "+": {*new}}
        for block in re.findall(r"```diff\n(.*?)```", section, re.S):
            for line in block.splitlines():
                assert line[0] not in found or line[1:].strip() in found[line[0]], line


@pytest.mark.parametrize("script", [*SCRIPTS, LONG_RUN])
def test_the_options_of_reference_and_of_the_docstring(script):
    _, docstring, code = (ROOT / script).read_text().split('"""', 2)
    has = {*re.findall(r'add\("([\w-]+)"', code)} - {"--local-rank"}  # which is hidden
    listed = set()
    for options, *_, scripts in table(REFERENCE, "option"):
        if (Path(script).name in scripts) != scripts.startswith("all"):
            listed.update(re.findall(r"`([\w-]+)`", options))
    assert listed == has, f"docs/reference.md does not fit {script}: {listed ^ has}"
    torchruns = {o for action in get_args_parser()._actions for o in action.option_strings}
    assert {*re.findall(r"--[a-z][\w-]+", docstring)} <= has | torchruns


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


def test_the_chinese_page_has_the_commands_and_no_link_of_its_own():
    for pattern in (r"^```bash\n.*?```", r"`[^`]*`(?= \|$)"):
        english, chinese = (re.findall(pattern, page, re.M | re.S) for page in (README, CHINESE))
        assert english == chinese != []
    english, chinese = ({*re.findall(r"\]\(([^)#]+)", page)} for page in (README, CHINESE))
    assert chinese - english == {"README.md"}


def test_gpu_figures_carry_commit_torch_and_device():
    """And say so if the form has changed since, or if that torch is two releases old."""
    section = (ROOT / "benchmarks" / "RESULTS.md").read_text().split("\n## One H100\n")[1]
    provenance = re.search(r"<!-- (\w{7}), torch 2\.(\d+), (.*): (.*) -->", section)
    commit, minor, device, files = provenance.groups()
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True).stdout  # noqa: E731
    same = [git("rev-parse", f"{commit}:{f}") == git("hash-object", f) for f in files.split()]
    recent = int(torch.__version__.split(".")[1]) - int(minor) < 2
    assert device in section and ("older form" in section) is not (recent and all(same))
    pages = [page.read_text() for page in PAGES if page.parent.name != "benchmarks"]
    assert all("#one-h100" in page for page in pages if "H100" in page)


def test_the_pages_are_no_longer_than_somebody_reads():
    pages = [page for page in PAGES if page.parent.name != "benchmarks"]
    assert sum(page.read_text().count("\n") for page in pages) <= 2100
