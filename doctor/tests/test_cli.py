"""The command: what it starts, what it says, its status, and that it puts back whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PACKAGE

from ddp_doctor.restore import leftovers

CHANGES = """
import os, shutil, sys, time
shutil.rmtree("runs")
open("last.ckpt", "w").write("new")
open("new.txt", "w").write("new")
print("changed", flush=True)
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "model.pt").write_text("old model")
    (folder / "last.ckpt").write_text("old weights")
    return folder


def is_as_before(work: Path) -> bool:
    old = (work / "runs" / "model.pt", "old model"), (work / "last.ckpt", "old weights")
    return all(path.is_file() and path.read_text() == text for path, text in old)


def doctor(work: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, str(PACKAGE), *words]
    return subprocess.Popen(command, cwd=work, stdout=-1, stderr=-1, text=True)


def run(work: Path, *words: str) -> tuple[int, str, str]:
    process = doctor(work, *words)
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def test_a_program_that_does_not_train(work: Path) -> None:
    (work / "change.py").write_text(CHANGES + "sys.exit(3)")
    for command in (["python", "change.py"], ["change.py"], ["python", "-u", "change.py"]):
        status, out, error = run(work, *command)
        assert (status, out.splitlines()[0]) == (2, "changed")
        assert "error: no process was watched that" in error and "(status 3)" in error
        assert is_as_before(work)
        assert (work / "new.txt").read_text() == "new"


def test_commands_that_are_not_python(work: Path) -> None:
    script = 'OUT=runs\nrm -rf "$OUT"  # away\necho new > last.ckpt\n[ ! -e runs ] && echo gone\n'
    (work / "train.sh").write_text(script)
    status, out, _ = run(work, "bash", "train.sh")
    assert (status, out.splitlines()[0]) == (2, "gone")
    assert is_as_before(work)
    (work / "train.sh").write_text("rm -rf $(cat folders)\n")
    status, out, error = run(work, "bash", "train.sh")
    assert status == 2
    assert "error: the program is not started: what `rm -rf $" in error


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["no-such-command"], "error: there is no command no-such-command"),
        (["python", "-I", "x.py"], "error: python -I ignores PYTHONPATH"),
        (["python", "-uE", "x.py"], "error: python -uE ignores PYTHONPATH"),
        (["--folder", "missing", "python", "x.py"], "error: "),
        ([], "error: name the command that trains"),
        (["restore", "."], "error: no run has left anything to put back"),
    ],
)
def test_what_cannot_be_run(work: Path, words: list[str], line: str) -> None:
    status, _, error = run(work, *words)
    assert status == 2
    assert line in error
    assert "Traceback" not in error
    assert not leftovers(work)


def test_explain(work: Path) -> None:
    status, out, _ = run(work, "explain")
    kinds = out.split("one of ")[1].strip().split(", ")
    assert status == 0
    assert {"hang", "crash"} < {*kinds}
    assert run(work, "explain", "hang")[:2] == (
        0,
        (PACKAGE / "ddp_doctor" / "explain" / "hang.md").read_text(),
    )
    assert run(work, "explain", "no-such-kind")[0] == 2


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_doctor(work: Path, name: str) -> None:
    (work / "change.py").write_text(CHANGES + "time.sleep(100)")
    process = doctor(work, "python", "change.py")
    assert process.stdout
    assert process.stdout.readline() == "changed\n"
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=30)
    assert process.returncode == 2
    assert is_as_before(work)


def test_a_program_that_ignores_signals_and_leaves_a_child(work: Path) -> None:
    ignore = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
    child = "import subprocess\nsubprocess.Popen([sys.executable, 'again.py'])\n"
    (work / "change.py").write_text(ignore + CHANGES + child)
    (work / "again.py").write_text(ignore + "while True: open('last.ckpt', 'a').write('x')")
    status, _, error = run(work, "python", "change.py")
    assert status == 2
    assert is_as_before(work), error
    time.sleep(0.5)
    assert is_as_before(work)


def test_the_doctor_is_killed(work: Path) -> None:
    (work / "change.py").write_text(CHANGES + "time.sleep(float(sys.argv[1]))")
    process = doctor(work, "python", "change.py", "8")
    assert process.stdout
    assert process.stderr
    assert process.stdout.readline() == "changed\n"
    line = process.stderr.readline()
    home = line.split("ddp-doctor restore ")[1].rstrip(")\n")
    process.kill()
    process.wait()
    assert not is_as_before(work)
    status, _, error = run(work, "restore", home)
    assert (status, "still lives" in error) == (2, True)  # the program goes on
    process.communicate()  # until the program ends, too
    _, _, error = run(work, "python", "-c", "pass")
    assert f"an earlier run was killed before it put files back: ddp-doctor restore {home}" in error
    assert run(work, "restore", str(work))[0] == 0
    assert is_as_before(work)
    assert not Path(home).exists()


def test_what_the_guard_does_not_see_is_said(work: Path) -> None:
    unseen = "import ctypes, os\nc = ctypes.CDLL(None)\nc.unlink(b'last.ckpt')\n"
    (work / "x.py").write_text(unseen + "c.creat(b'runs/model.pt', 0o644)")
    _, _, error = run(work, "python", "x.py")
    assert "last.ckpt HAS GONE, by something that the doctor did not see" in error
    assert "model.pt HAS CHANGED, by something that the doctor did not see" in error


def test_the_doctors_own_failure_is_no_finding(work: Path) -> None:
    (work / "torch").mkdir()
    (work / "torch" / "__init__.py").write_text("")  # in which the watcher finds nothing
    (work / "x.py").write_text("import torch\nprint('goes on')")
    status, out, error = run(work, "python", "x.py")
    assert (status, out.splitlines()[0]) == (2, "goes on")
    assert "error: the doctor failed: watch: " in error


def test_a_process_without_the_guard_is_noticed(work: Path) -> None:
    (work / "x.py").write_text("print('unseen')")
    environment = {name: os.environ[name] for name in ("PATH",)}
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, 'x.py'], env={environment})"
    status, _, error = run(work, "python", "-c", program)
    assert (status, "no process was watched" in error) == (2, True)


def test_the_environment_is_the_users(work: Path) -> None:
    """Its own sitecustomize is imported, too, and its arguments arrive."""
    (work / "sitecustomize.py").write_text("import builtins; builtins.mine = 1")
    (work / "x.py").write_text(
        "import sys, json; print(json.dumps([mine, sys.argv[1:], sys.path]))"
    )
    command = [sys.executable, str(PACKAGE), "python", "x.py", "--json", "a b"]
    environment = os.environ | {"PYTHONPATH": str(work)}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    mine, words, path = json.loads(done.stdout.splitlines()[0])
    assert (mine, words) == (1, ["--json", "a b"])
    assert not [folder for folder in path if str(PACKAGE) in folder]


def test_a_refusal_ends_the_whole_job(work: Path) -> None:
    """A child refuses; its parent, which would go on, is ended, and all is put back."""
    (work / "child.py").write_text(CHANGES + "os.system('rm -rf $(echo .)')")
    parent = "import subprocess, sys, time\nsubprocess.run([sys.executable, 'child.py'])\n"
    (work / "x.py").write_text(parent + "time.sleep(100)")
    status, out, error = run(work, "python", "x.py")
    assert (status, out.splitlines()[0]) == (2, "changed")
    assert "error: the program is stopped before it destroys something: what `rm -rf" in error
    assert is_as_before(work)
