"""What the checks say of recorded programs (fixtures/, made by record.py). They need no torch."""

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from programs import PROGRAMS

from ddp_doctor import events
from ddp_doctor.checks import judge
from ddp_doctor.job import Found, Job

HERE = Path(__file__).resolve().parent
PARTS = 8  # of all programs, which are run side by side


def judged(fixture: Path, folder: Path) -> list[Found]:
    with tarfile.open(fixture) as file:
        file.extractall(folder, filter="data")
    return judge(Job(folder, 0))


def check(name: str, lines: list[Found]) -> None:
    label, _, kind = PROGRAMS[name][1].rpartition(" ")
    found = [line.kind for line in lines if line.label == "FOUND"]
    assert found == ([kind] if kind and not label else []), [*map(str, lines)]
    assert not label or kind in [line.kind for line in lines if line.label == label]
    assert not any(line.place == "the doctor" for line in lines), [*map(str, lines)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_mistake_is_found_and_nothing_else(tmp_path: Path, name: str) -> None:
    check(name, judged(HERE / "fixtures" / f"{name}.tar.xz", tmp_path))


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_watched_today_is_judged_so_and_changes_nothing(tmp_path: Path, part: int) -> None:
    """Each program once more, and without the doctor, in the manner of record.py."""
    names = [*PROGRAMS][part::PARTS]
    command = [sys.executable, HERE / "record.py", "--to", tmp_path, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        check(name, judged(tmp_path / f"{name}.tar.xz", tmp_path / name))


def test_each_kind_has_a_page() -> None:
    package = HERE.parent / "ddp_doctor"
    pages = {page.stem for page in (package / "explain").glob("*.md")}
    source = "".join(path.read_text() for path in (package / "checks").glob("*.py"))
    kinds = {*re.findall(r'(?:Found|told)\(\s*"([a-z-]+)"', source)}
    kinds |= {*re.findall(r'return "([a-z-]+)"', source)}
    assert len(kinds) > 50 and kinds == pages, kinds ^ pages
    assert {kind.removeprefix("NOTE ") for _, kind in PROGRAMS.values()} - {""} <= kinds


def test_each_event_is_described() -> None:
    """events.py has all keys of each kind."""
    described = [kind for kind in vars(events).values() if hasattr(kind, "__total__")]
    keys = {kind.__name__.lower(): kind.__annotations__.keys() for kind in described}
    for path in (HERE / "fixtures").iterdir():
        with tarfile.open(path) as file:
            lines = [line for m in file if m.name.endswith("l") for line in file.extractfile(m)]
        for event in map(json.loads, lines):
            assert event.keys() <= keys[event["kind"]], event
