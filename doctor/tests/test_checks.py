"""What the checks say of recorded programs (fixtures/, made by record.py). No torch is needed."""

import tarfile
from pathlib import Path

import pytest
from programs import PROGRAMS

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
