"""README's commands, as written, and what it names. Its two set-up commands are run by .ci/run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, epochs

README = (ROOT / "README.md").read_text()


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
    commands = re.findall(r"^python3 -m venv .*$", README, re.M)
    assert [command.split(" && ")[-1] for command in commands] == [
        ".venv/bin/python ddp_spawn.py 50 10",
        ".venv/bin/pytest",
    ]


def blocks(section: str) -> list[list[str]]:
    """The commands of a section, block by block."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    return [block.splitlines() for block in re.findall(r"```bash\n(.*?)```", text, re.S)]


def test_the_commands_in_their_order(clone):
    (commands,) = blocks("Which script for me?")
    outputs = [shell(command, clone) for command in commands]
    assert [len(epochs(output)) for output in outputs] == [3, 3, 3, 1, 0]
    assert "usage: ddp_spawn.py" in outputs[-1]


def test_the_commands_for_torchrun(clone):
    (commands,) = blocks("torchrun")
    outputs = [shell(command, clone) for command in commands if not command.startswith("export ")]
    assert [len(epochs(output)) for output in outputs] == [5, 3, 1, 1]


def test_the_launch_lines_of_the_table(clone):
    commands = re.findall(r"\| `((?:python|torchrun) [^`]*) 50 10` \|", README)
    assert [re.search(r"\w+\.py", command)[0] for command in commands] == list(SCRIPTS)
    for command in commands:
        command = re.sub(
            r"tcp://.*--world-size 2", f"file://{clone}/store --rank 0 --world-size 1", command
        )
        assert len(epochs(shell(f"{command} 1 1", clone))) == 1


def test_the_numbers_of_batches_and_steps():
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| 0", README, re.M)
    assert len(rows) == 7
    for processes, batch_size, accumulate, global_batch, steps in (map(int, row) for row in rows):
        assert processes * batch_size * accumulate == global_batch
        assert -(-12_000 // global_batch) == steps


def test_the_files_that_it_names_are_there():
    for name in re.findall(r"`(tests/\w+\.py|\w+\.py|common/)`", README):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("script", SCRIPTS)
def test_docstrings_name_options_that_exist(clone, script):
    text = (ROOT / script).read_text().split('"""')[1]
    known = shell(f"python {script} --help; torchrun --help", clone)
    for option in re.findall(r"(--[a-z][a-z_-]+)", text):
        assert option in known, option
    assert f"python {script}" in text
