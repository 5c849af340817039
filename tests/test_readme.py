"""README's commands, as written, and what it names. Its two set-up commands are run by .ci/run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT, SCRIPTS, epochs

README = (ROOT / "README.md").read_text()
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository's scripts, with a tenth of the digits: it is the commands that matter here."""
    folder = tmp_path_factory.mktemp("clone")
    for script in SCRIPTS:
        shutil.copy(ROOT / script, folder)
    shutil.copytree(ROOT / "common", folder / "common")
    data = folder / "common" / "data.py"
    text = data.read_text()
    assert text.count("make_digits(12_000, seed=0)") == 1
    data.write_text(text.replace("make_digits(12_000, seed=0)", "make_digits(1_200, seed=0)"))
    return folder


def shell(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PATH": path},  # tests run side by side
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_two_set_up_commands():
    commands = re.findall(r"^python3 -m venv .venv && .*$", README, re.M)
    assert [command.split(" && ")[-1] for command in commands] == [
        ".venv/bin/python ddp_spawn.py 50 10",
        ".venv/bin/pytest",
    ]


def blocks(section: str) -> list[list[str]]:
    """The commands of a section, block by block."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    return [block.splitlines() for block in re.findall(r"```bash\n(.*?)```", text, re.S)]


def test_what_copying_it_prints(clone):
    """The lines that README shows, but for the numbers, which are of another machine."""
    (copy,) = blocks("Copy this")
    assert copy[-1] == "torchrun --nproc_per_node=gpu ddp_torchrun.py"
    output = shell(copy[-1].replace("=gpu", "=2") + " 1 --device cpu", clone)

    def lines(text: str) -> list[str]:
        return sorted(re.sub(r"\d+(\.\d+)?", "N", line) for line in text.splitlines())

    (shown,) = re.findall(r"```text\n(.*?)```", README, re.S)
    assert len(shown.splitlines()) == 6 and {*lines(shown)} <= {*lines(output)}


@pytest.mark.slow("real command lines, one after the other")
def test_a_run_and_a_resumed_one(clone):
    (commands,) = blocks("A resumed run")
    outputs = [shell(command, clone) for command in commands]
    assert [len(epochs(output)) for output in outputs] == [3, 1]


@pytest.mark.slow("real command lines, one after the other")
def test_the_commands_for_torchrun(clone):
    (commands,) = blocks("torchrun")
    outputs = [shell(command, clone) for command in commands if not command.startswith("export ")]
    assert [len(epochs(output)) for output in outputs] == [5, 2, 1, 1]


@pytest.mark.slow("real command lines, one after the other")
def test_the_launch_lines_of_the_table(clone):
    commands = re.findall(r"\| `((?:python|torchrun) [^`]*) 50 10` \|", README)
    first, second = (command for command in commands if "--nnodes=" in command)
    assert second == first.replace("--node_rank=0", "--node_rank=1")  # test_torchrun.py runs these
    commands = [command for command in commands if command not in (first, second)]
    assert [re.search(r"\w+\.py", command)[0] for command in commands] == list(SCRIPTS)
    for command in commands:
        command = command.replace("=gpu", "=2")  # as README says for a CPU
        command = re.sub(
            r"tcp://.*--world-size 2", f"file://{clone}/store --rank 0 --world-size 1", command
        )
        assert len(epochs(shell(f"{command} 1 1", clone))) == 1


def test_the_numbers_of_batches_and_steps():
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", README, re.M)
    assert len(rows) == 3
    for processes, batch_size, accumulate, global_batch, steps in (map(int, row) for row in rows):
        assert processes * batch_size * accumulate == global_batch
        assert -(-12_000 // global_batch) == steps


def test_the_files_that_it_names_are_there():
    names = re.findall(r"`(tests/[\w/]+\.py|\w+\.py|common/)`", README + GUARANTEES)
    for name in (name for name in names if name != "train.py"):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(([\w/.-]+)[)#]", README):
        assert (ROOT / name).exists(), name
    tests = re.findall(r"`(tests/\w+\.py)::(\w+)`", GUARANTEES)
    assert len(tests) > 10
    for file, test in tests:
        assert f"\ndef {test}(" in (ROOT / file).read_text(), test


def test_readmes_command_shows_each_guarantee():
    """Of the tests that a row names, it runs at least one."""
    quick = ["-m", "not slow and not gpu", "-n", "0", "--collect-only", "--quiet", "tests"]
    collect = [sys.executable, "-m", "pytest", *quick]
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=True)
    quick = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    (rows,) = re.findall(r"^\| \| shown by \|\n\|[- |]*\n((?:\|.*\n)+)", GUARANTEES, re.M)
    assert len(rows.splitlines()) == 8 and len(quick) > 100
    for row in rows.splitlines():
        named = re.findall(r"`(tests/\w+\.py::\w+)`", row)
        assert not quick.isdisjoint(named), row


@pytest.fixture(scope="module")
def torchruns_options(clone):
    return shell("torchrun --help", clone)


@pytest.mark.parametrize("script", SCRIPTS)
def test_docstrings_name_options_that_exist(clone, torchruns_options, script):
    text = (ROOT / script).read_text().split('"""')[1]
    known = shell(f"python {script} --help", clone) + torchruns_options
    for option in re.findall(r"(--[a-z][a-z_-]+)", text):
        assert option in known, option
    assert f"python {script}" in text


def kept(text: str) -> list:
    """What a translation leaves as it is. Words may change places, within a section or a cell."""
    spans = [" ".join(span.split()) for span in re.findall(r"`[^`]+`", text)]
    text = text.replace(".zh-CN.md", ".md")  # a page that is translated, too
    text = re.sub(r"\]\(#[^)]*\)", "](#)", text)  # headings are translated
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", text)
    numbers = re.findall(r"\d+(?:[.,]\d+)*%?", re.sub(r"`[^`]+`|\]\([^)]*\)", "", text))
    return [sorted(spans), sorted(links), sorted(numbers), text.count("<block>")]


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_its_own_anchors_lead_to_headings(name):
    text = (ROOT / name).read_text()
    headings = [line.lower().replace(" ", "-") for line in re.findall(r"^## (.*)$", text, re.M)]
    anchors = re.findall(r"\]\(#([^)]*)\)", text)
    assert len(anchors) == 6 and {*anchors} <= {*headings}


def test_the_chinese_readme_has_the_same_commands_and_tables():
    chinese = (ROOT / "README.zh-CN.md").read_text()
    blocks, sections = [], []
    for text, link in ((README, "[中文](README.zh-CN.md)"), (chinese, "[English](README.md)")):
        assert re.match(rf"# .*\n\n{re.escape(link)}\n\n", text)
        fence = re.compile(r"^```.*?^```$", re.M | re.S)
        blocks.append(fence.findall(text))
        prose = fence.sub("<block>", text.replace(link, "", 1))
        sections.append(re.split(r"^(?=#+ )", prose, flags=re.M))
    assert blocks[0] == blocks[1]
    levels = [[re.match("#*", section)[0] for section in side] for side in sections]
    assert levels[0] == levels[1]
    for pair in zip(*sections, strict=True):
        assert kept(pair[0]) == kept(pair[1])
        tables = [re.findall(r"(?:^\|.*\n)+", section, re.M) for section in pair]
        cells = [[[line.split("|") for line in t.splitlines()] for t in side] for side in tables]
        kept_cells = [[[list(map(kept, row)) for row in t] for t in side] for side in cells]
        assert kept_cells[0] == kept_cells[1]
