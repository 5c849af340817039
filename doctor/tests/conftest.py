"""What all tests need: a run's folders, and a program that is guarded as a rank is."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PACKAGE))

from ddp_doctor.disk import make_home  # noqa: E402


class Guarded:
    """Programs that run below a doctor, and what it then restores."""

    def __init__(self, folder: Path) -> None:
        self.work, self.notes = folder / "work", folder / "notes"
        self.work.mkdir()
        self.notes.mkdir()
        self.home: Path | None = None
        self.more: dict[str, str] = {}

    def environment(self) -> dict[str, str]:
        if self.home is None:
            time.sleep(0.02)  # the clock of a file system is coarse
            self.home = make_home(self.work)
            start = json.loads((self.home / "journal.jsonl").read_text())["start"]
            time.sleep(0.02)
            self.more["DDP_DOCTOR_START"] = str(start)
        own = {"DDP_DOCTOR_FOLDER": str(self.notes), "DDP_DOCTOR_VAULT": str(self.home)}
        own |= {"PYTHONPATH": str(PACKAGE / "ddp_doctor" / "site"), "OMP_NUM_THREADS": "1"}
        return os.environ | own | self.more

    def start(self, program: str, *words: str) -> subprocess.Popen:
        command = [sys.executable, "-c", program, *words]
        return subprocess.Popen(
            command, cwd=self.work, env=self.environment(), stdout=-1, stderr=-1, text=True
        )

    def run(self, program: str, *words: str, status: int = 0) -> str:
        process = self.start(program, *words)
        out, error = process.communicate(timeout=120)
        assert process.returncode == status, error
        return out + error


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    own = Guarded(tmp_path)
    yield own
    if own.home:
        shutil.rmtree(own.home, ignore_errors=True)
