"""What the checks say of recorded programs (fixtures/, made by record.py). No torch is needed."""

import json
import tarfile
from pathlib import Path

import pytest
from programs import PROGRAMS

from ddp_doctor import events
from ddp_doctor.checks import judge
from ddp_doctor.job import Job

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_mistake_is_found_and_nothing_else(tmp_path: Path, name: str) -> None:
    with tarfile.open(HERE / "fixtures" / f"{name}.tar.xz") as file:
        file.extractall(tmp_path, filter="data")
    lines = judge(Job(tmp_path, 0))
    found = [line.kind for line in lines if line.label == "FOUND"]
    assert found == [kind for kind in [PROGRAMS[name][1]] if kind], [*map(str, lines)]
    assert not any(line.place == "the doctor" for line in lines), [*map(str, lines)]


def test_each_kind_has_a_page() -> None:
    package = HERE.parent / "ddp_doctor"
    pages = {page.stem for page in (package / "explain").glob("*.md")}
    source = "".join(path.read_text() for path in (package / "checks").glob("*.py"))
    assert all(f'"{page}"' in source for page in pages)
    assert {kind for _, kind in PROGRAMS.values()} - {""} <= pages


def test_each_event_is_described() -> None:
    """events.py has the keys of each kind, and their types as far as a key may be missing."""
    kinds = {
        name.lower(): kind.__annotations__ for name, kind in vars(events).items() if is_event(kind)
    }
    for path in (HERE / "fixtures").iterdir():
        with tarfile.open(path) as file:
            lines = [line for m in file if m.name.endswith("l") for line in file.extractfile(m)]
        for event in map(json.loads, lines):
            assert event.keys() <= kinds[event["kind"]].keys(), event


def is_event(kind: object) -> bool:
    return isinstance(kind, type) and "kind" in getattr(kind, "__annotations__", ())
