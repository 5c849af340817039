"""Whatever was there before a run is there afterwards, byte for byte, whatever a program does."""

import contextlib
import functools
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import Guarded

from ddp_doctor.disk import make_home
from ddp_doctor.restore import Undo, is_free
from ddp_doctor.vault import Vault

OLD = {
    "last.ckpt": b"the old weights\n" * 100,
    "runs/checkpoint-500/model.pt": b"five hundred",
    "runs/checkpoint-500/deep/optimizer.pt": b"momentum",
    "runs/events.out.tfevents.1": b"summary",
    "logs/train.log": b"line 1\nline 2\n",
    "empty.lock": b"",
    "data.db": b"",
    "read-only/keep.pt": b"kept",
}


def fill(work: Path) -> None:
    for name, content in OLD.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(content)
    (work / "latest").symlink_to("runs/checkpoint-500")
    (work / "link.ckpt").symlink_to("last.ckpt")
    os.link(work / "last.ckpt", work / "second-name.ckpt")
    (work / "empty-folder").mkdir(mode=0o750)
    (work / "last.ckpt").chmod(0o640)
    os.utime(work / "last.ckpt", ns=(10**18, 10**18 + 7))


def state(work: Path) -> dict[str, tuple]:
    """All that is there: kinds, modes, times and contents."""
    found = {}
    for path in sorted(work.rglob("*")):
        own = path.lstat()
        if path.is_symlink():
            facts: tuple = (os.readlink(path),)
        elif path.is_dir():
            facts = (stat.S_IMODE(own.st_mode),)
        else:
            facts = (stat.S_IMODE(own.st_mode), own.st_mtime_ns, path.read_bytes())
        found[str(path.relative_to(work))] = facts
    return found


def restored(guarded: Guarded) -> dict[str, tuple]:
    assert guarded.home
    assert is_free(guarded.home)
    undo = Undo(guarded.home)
    undo.run()
    assert not undo.failed, undo.failed
    assert not guarded.home.exists()
    return state(guarded.work)


class Killed(BaseException):
    pass


def interrupt(guarded: Guarded, seed: int) -> None:
    """Restore, but be killed after a few acts, again and again."""
    chance = random.Random(seed)
    names = ("link", "rename", "remove", "mkdir", "symlink", "chmod", "utime", "rmdir", "unlink")
    while guarded.home and (guarded.home / "journal.jsonl").exists():
        left = chance.randint(1, 9)

        def killed(original: Callable, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and chance.random() < 0.5:
                raise Killed
            result = original(*args, **kwargs)
            if left == 0:
                raise Killed
            return result

        with contextlib.suppress(Killed), contextlib.ExitStack() as stack:
            for owner, name in [*((os, name) for name in names), (shutil, "copyfileobj")]:
                original = getattr(owner, name)
                function = functools.partial(killed, original)
                stack.enter_context(mock.patch.object(owner, name, function))
            undo = Undo(guarded.home)
            undo.run()
            assert not undo.failed, undo.failed


# Each program destroys something in its own way, and may leave the new file that is named.
PROGRAMS = {
    "open w": 'open("last.ckpt", "w").write("new")',
    "open wb, through a link": 'open("link.ckpt", "wb").write(b"new")',
    "open wb, by a second name": 'open("second-name.ckpt", "wb").write(b"new")',
    "open a": 'open("logs/train.log", "a").write("line 3")',
    "open r+": 'f = open("last.ckpt", "r+b"); f.write(b"XX"); f.close()',
    "open w+": 'open("last.ckpt", "w+").write("new")',
    "open x": 'try: open("last.ckpt", "x")\nexcept FileExistsError: open("new", "x").write("1")',
    "open in bytes": 'open(b"last.ckpt", "wb").write(b"new")',
    "os.open": 'os.write(os.open("last.ckpt", os.O_WRONLY | os.O_TRUNC), b"new")',
    "os.open to read and to empty": 'os.open("last.ckpt", os.O_RDONLY | os.O_TRUNC)',
    "os.open in a folder": """
fd = os.open("runs", os.O_RDONLY)
os.close(os.open("events.out.tfevents.1", os.O_WRONLY | os.O_TRUNC, dir_fd=fd))""",
    "os.fdopen": 'os.fdopen(os.open("last.ckpt", os.O_RDWR), "r+b").write(b"XX")',
    "io.FileIO": 'io.FileIO("last.ckpt", "w").write(b"new")',
    "an opener": 'open("last.ckpt", "w", opener=lambda p, f: os.open(p, f)).write("new")',
    "pathlib": 'Path("last.ckpt").write_text("new"); Path("logs/train.log").unlink()',
    "pathlib renames": 'Path("last.ckpt").rename("old.ckpt"); Path("last.ckpt").write_text("new")',
    "touch": 'Path("last.ckpt").touch(); Path("empty.lock").touch()',
    "os.truncate": 'os.truncate("last.ckpt", 3)',
    "truncate": 'f = open("last.ckpt", "a"); f.truncate(3)',
    "mmap": 'f = open("last.ckpt", "r+b"); m = mmap.mmap(f.fileno(), 0); m[:3] = b"XXX"; m.flush()',
    "os.remove": 'os.remove("last.ckpt"); os.unlink("second-name.ckpt")',
    "os.remove in a folder": 'os.remove("train.log", dir_fd=os.open("logs", os.O_RDONLY))',
    "removing a link": 'os.remove("latest"); os.remove("link.ckpt")',
    "another target": 'os.remove("latest"); os.symlink("new", "latest"); os.mkdir("new")',
    "os.replace": 'open("t", "w").write("new"); os.replace("t", "last.ckpt")',
    "replace a link": 'os.symlink("new", "t"); os.replace("t", "latest"); os.mkdir("new")',
    "os.replace twice": """
for n in "123":
    open("t", "w").write(n)
    os.replace("t", "last.ckpt")""",
    "rename in folders": """
fd = os.open("runs", os.O_RDONLY)
os.rename("events.out.tfevents.1", "2", src_dir_fd=fd, dst_dir_fd=os.open("logs", os.O_RDONLY))""",
    "shutil.rmtree": 'shutil.rmtree("runs")',
    "rmtree, made again": """
shutil.rmtree("runs/checkpoint-500")
os.mkdir("runs/checkpoint-500")
open("runs/checkpoint-500/model.pt", "w").write("new")
open("runs/checkpoint-500/more.pt", "w").write("new")""",
    "a file in the place of a folder": 'shutil.rmtree("runs"); open("runs", "w").write("new")',
    "new files with the numbers of old folders": """
shutil.rmtree("runs"); os.remove("latest"); os.rmdir("empty-folder")
for n in range(20): open(f"t{n}", "w").write("new"); os.rename(f"t{n}", f"n{n}")
for n in range(10): os.remove(f"n{n}")""",
    "a folder in the place of a file": 'os.remove("last.ckpt"); os.makedirs("last.ckpt/new")',
    "rmtree by a link": 'shutil.rmtree(os.path.realpath("latest"))',
    "shutil.move": 'shutil.move("last.ckpt", "logs"); shutil.move("runs", "old")',
    "shutil.copy over it": 'open("t", "w").write("new"); shutil.copy("t", "last.ckpt")',
    "shutil.copy2": 'open("t", "w").write("new"); shutil.copy2("t", "last.ckpt"); os.remove("t")',
    "copytree over it": """
os.makedirs("n/checkpoint-500"); open("n/checkpoint-500/model.pt", "w").write("new")
shutil.copytree("n", "runs", dirs_exist_ok=True)""",
    "a folder is renamed, then emptied": """
os.rename("runs", "runs.old")
open("runs.old/checkpoint-500/model.pt", "w").write("new")
shutil.rmtree("runs.old")
for n in range(9): os.mkdir(f"new{n}"); open(f"new{n}.pt", "w")  # in the place of their inodes""",
    "an old file in the place of a new link": """
os.link("last.ckpt", "t"); os.rename("logs/train.log", "t"); os.remove("t")""",
    "a folder is renamed and made again": """
os.rename("runs", "runs.old")
os.makedirs("runs/checkpoint-500"); open("runs/checkpoint-500/model.pt", "w").write("new")
os.rename("runs.old/checkpoint-500/model.pt", "moved.pt")
open("moved.pt", "w").write("new")""",
    "rotation": """
for n in (3, 2, 1, 0):
    if os.path.exists(f"c{n}"): os.rename(f"c{n}", f"c{n + 1}")
os.rename("last.ckpt", "c0")
for n in (3, 2, 1, 0):
    if os.path.exists(f"c{n}"): os.rename(f"c{n}", f"c{n + 1}")
os.remove("c1")""",
    "an exchange": """
os.rename("last.ckpt", "t"); os.rename("logs/train.log", "last.ckpt")
os.rename("t", "logs/train.log"); open("last.ckpt", "w").write("new")""",
    "old things in a new folder": """
os.mkdir("archive"); os.rename("last.ckpt", "archive/last.ckpt")
os.rename("archive", "attic"); os.remove("attic/last.ckpt")""",
    "empty folders": 'os.rmdir("empty-folder")',
    "an empty folder is used": """
open("empty-folder/x", "w").write("new"); shutil.rmtree("empty-folder")""",
    "modes and times": """
os.chmod("last.ckpt", 0o600); os.utime("last.ckpt"); os.chmod("runs", 0o700)
os.chmod("last.ckpt", 0o666); open("last.ckpt", "w").write("new")""",
    "fchmod": 'os.fchmod(os.open("last.ckpt", os.O_RDONLY), 0o600)',
    "hard links": """
os.link("last.ckpt", "best.ckpt"); os.remove("last.ckpt")
open("best.ckpt", "w").write("new")""",
    "a new hard link goes again": 'os.link("last.ckpt", "t"); os.replace("t", "latest.ckpt")',
    "a log that rotates": """
h = logging.handlers.RotatingFileHandler("logs/train.log", maxBytes=20, backupCount=2)
for n in range(9): h.emit(logging.makeLogRecord({"msg": f"message {n}"}))""",
    "sqlite3": """
import sqlite3
c = sqlite3.connect("file:data.db?mode=rwc", uri=True); c.execute("create table t (x)"); c.commit()
""",
    "in a process of its own": """
subprocess.run([sys.executable, "-c", "import os; os.remove('last.ckpt')"], check=True)""",
    "in a fork": """
if (pid := os.fork()) == 0: os.remove("last.ckpt"); os._exit(0)
os.waitpid(pid, 0)""",
    "in multiprocessing": """
import multiprocessing as mp
p = mp.get_context("fork").Process(target=os.remove, args=("last.ckpt",)); p.start(); p.join()""",
    "in threads": """
def act(n):
    open("logs/train.log", "w").write("new"); open(f"new{n}", "w").write("n")
    os.replace(f"new{n}", "last.ckpt")
ts = [threading.Thread(target=act, args=(n,)) for n in range(8)]
for t in ts: t.start()
for t in ts: t.join()""",
    "in another folder": 'os.chdir("runs"); open("../last.ckpt", "w").write("new")',
    "tempfile": """
import tempfile
f = tempfile.NamedTemporaryFile("w", dir=".", delete=False); f.write("new"); f.close()
os.replace(f.name, "last.ckpt")""",
    "zipfile": 'import zipfile; zipfile.ZipFile("last.ckpt", "w").writestr("x", "new")',
    "numpy": """
import numpy as np
np.savez(open("last.ckpt", "wb"), x=np.ones(3)); np.memmap("logs/train.log", "uint8", "r+")[:] = 1
np.save("runs/events.out.tfevents.1.npy", np.ones(3))""",
    "shelve": 'import shelve\nwith shelve.open("data.db", flag="n") as s: s["x"] = 1',
    "rm": 'subprocess.run(["rm", "-rf", "runs", "last.ckpt"], check=True)',
    "rm in a line": 'os.system("cd runs && rm -rf checkpoint-* ; echo new > ../last.ckpt")',
    "mv": 'subprocess.run("mv last.ckpt old.ckpt; mv runs logs/", shell=True, check=True)',
    "mv over it": 'os.system("echo new > t && mv -f t last.ckpt")',
    "cp": 'os.system("cp logs/train.log last.ckpt; cp last.ckpt runs/checkpoint-500/model.pt")',
    "cp into a folder": 'os.system("mkdir n; echo new > n/train.log; cp n/train.log logs")',
    "shell redirections": 'os.system("echo x >> logs/train.log; : > last.ckpt; echo 2>data.db")',
    "tee": 'os.system("echo x | tee -a logs/train.log")',
    "sed": 'os.system("sed -i s/old/new/ last.ckpt")',
    "dd": 'os.system("dd if=/dev/zero of=last.ckpt bs=10 count=1 2>/dev/null")',
    "truncate by a command": 'os.system("truncate -s 3 last.ckpt")',
    "tar": """
os.system("mkdir n; echo new > n/last.ckpt; tar cf n.tar -C n last.ckpt; tar xf n.tar")""",
    "gzip": """
os.system("gzip -k logs/train.log; cp logs/train.log.gz n.gz; echo 3 >> logs/train.log")
os.system("gzip -kf logs/train.log; gunzip -kf logs/train.log.gz; split -b 9 last.ckpt runs/e")""",
    "find": 'os.system("find runs -name model.pt -delete")',
    "a variable": 'os.system("D=runs; rm -rf $D/checkpoint-500")',
    "a script": """
open("s.sh", "w").write("#!/bin/sh\\nrm -rf runs\\n"); os.chmod("s.sh", 0o755)
subprocess.run(["./s.sh"], check=True); subprocess.run(["sh", "s.sh"], check=True)""",
    "os.exec": 'os.execvp("rm", ["rm", "last.ckpt"])',
    "os.posix_spawn": """
os.waitpid(os.posix_spawn("/bin/rm", ["rm", "last.ckpt"], os.environ), 0)""",
    "all at once": """
for n in os.listdir():
    shutil.rmtree(n) if os.path.isdir(n) and not os.path.islink(n) else os.remove(n)""",
}
MODULES = "import io, logging.handlers, mmap, os, shutil, subprocess, sys, threading, time\n"
MODULES += "from pathlib import Path\n"


# What is new afterwards, where it is not simply what the program has left: a new folder in the
# place of something old is kept by its side, and what was moved there is moved back.
NOTHING: set[str] = set()
ELSEWHERE = {
    "pathlib renames": NOTHING,
    "rename in folders": NOTHING,
    "shutil.move": NOTHING,
    "a log that rotates": NOTHING,
    "a folder is renamed and made again": {
        "runs.new",
        "runs.new/checkpoint-500",
        "runs.new/checkpoint-500/model.pt",
    },
    "old things in a new folder": {"archive"},
    "a folder in the place of a file": {"last.ckpt.new", "last.ckpt.new/new"},
    "mv": NOTHING,
}


@pytest.mark.parametrize(
    "births", [True, False], ids=["births", "no births, and restoring is interrupted"]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_is_as_it_was(guarded: Guarded, name: str, births: bool) -> None:
    fill(guarded.work)
    before = state(guarded.work)
    unknown = (
        "import ddp_doctor.disk as d, ddp_doctor.vault as v\nd.birth = v.birth = lambda *a: None\n"
    )
    guarded.run(MODULES + ("" if births else unknown) + PROGRAMS[name])
    changed = state(guarded.work)
    if births:
        after = restored(guarded)
    else:
        interrupt(guarded, seed=len(name))
        after = state(guarded.work)
    assert {path: after.get(path) for path in before} == before
    assert changed != before or name in ("open x", "touch", "os.fdopen")
    new = {path for path in changed if path not in before}
    assert {path for path in after if path not in before} == ELSEWHERE.get(name, new)


# --- several processes, kills, disks
STORM = """
import random
chance, end = random.Random(int(sys.argv[1])), time.time() + 20
open("begun" + sys.argv[1], "w")
names = ["last.ckpt", "logs/train.log", "runs/events.out.tfevents.1", "second-name.ckpt", "moved"]
names += [f"many/{n}.pt" for n in range(300)]
own = [f"many/{n}.pt" + sys.argv[1] for n in range(20)]  # another rank cannot open at that moment
while time.time() < end:
    a, b = chance.choice(names + own), chance.choice(own)
    with contextlib.suppress(OSError):
        match chance.randrange(9):
            case 0: os.remove(a)
            case 1: os.rename(a, b)
            case 2: open(a, "w").write("new" * 9000)
            case 3: open(a, "a").write("new")
            case 4: open("t" + sys.argv[1], "w").write("new"); os.replace("t" + sys.argv[1], a)
            case 5: shutil.rmtree("runs") if sys.argv[1][-1] == "0" else None
            case 6: os.makedirs("runs", exist_ok=True)
            case 7: os.rename("runs", "runs.old") if sys.argv[1][-1] == "0" else None
            case 8: os.link(a, b)
"""


@pytest.mark.parametrize("seed", range(6))
def test_ranks_on_the_same_files_that_are_killed(guarded: Guarded, seed: int) -> None:
    fill(guarded.work)
    (guarded.work / "many").mkdir()
    for n in range(300):
        (guarded.work / "many" / f"{n}.pt").write_text(f"{n} " * 300)
    before = state(guarded.work)
    large = "import ddp_doctor.vault as v\nv.SMALL = 1000\n" if seed % 2 else ""
    program = "import contextlib\n" + MODULES + large + STORM
    ranks = [guarded.start(program, str(10 * seed + rank)) for rank in range(3)]
    begun = [guarded.work / f"begun{10 * seed + rank}" for rank in range(3)]
    wait = time.monotonic() + 60  # a busy machine takes seconds to import torch
    while not all(path.exists() for path in begun):
        assert time.monotonic() < wait, "a rank has not begun"
    time.sleep(1 + 0.1 * seed)
    for rank in ranks:
        rank.kill()
        assert "doctor failed" not in rank.communicate()[1]
    interrupt(guarded, seed)
    after = state(guarded.work)
    assert {path: after.get(path) for path in before} == before


def test_two_ranks_rename_the_same_file(tmp_path: Path) -> None:
    """Both are noted, one comes first, and then a new file is in the old one's place."""
    old, one, two = (tmp_path / name for name in ("old.pt", "one.pt", "two.pt"))
    old.write_bytes(b"old")
    time.sleep(0.02)  # the clock of a file system is coarse
    home = make_home(tmp_path)
    time.sleep(0.02)
    first, second = Vault(str(home)), Vault(str(home))
    first.before_rename(str(old), str(one))
    second.before_rename(str(old), str(two))
    old.rename(one)
    old.write_bytes(b"new")
    Undo(home).run()
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")} == {"old.pt": b"old"}


def test_a_rank_acts_while_another_puts_the_same_file_away(tmp_path: Path) -> None:
    """What is linked, or copied, is then a new file in the old one's place."""
    old, moved = tmp_path / "old.pt", tmp_path / "moved.pt"
    old.write_bytes(b"old")
    time.sleep(0.02)
    home = make_home(tmp_path)
    time.sleep(0.02)
    first, second = Vault(str(home)), Vault(str(home))
    first.before_rename(str(old), str(moved))
    link = os.link

    def late(source: str, target: str) -> None:
        if not moved.exists():
            old.rename(moved)
            old.write_bytes(b"new")
        link(source, target)

    with mock.patch("os.link", late):
        second.before_remove(str(old))
    old.unlink()
    Undo(home).run()
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")} == {"old.pt": b"old"}


WRITERS = """
import torch, torch.distributed as dist
from torch import nn
model = nn.Linear(4, 4)
torch.save(model.state_dict(), "last.ckpt")
torch.jit.save(torch.jit.script(model), "runs/checkpoint-500/model.pt")
with torch.profiler.profile() as profile: model(torch.ones(1, 4))
profile.export_chrome_trace("logs/train.log")
torch.from_file("runs/checkpoint-500/deep/optimizer.pt", True, 2).fill_(1)
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("empty.lock"), rank=0,
    world_size=1)
import torch.distributed.checkpoint as dcp
dcp.save({"model": model.state_dict()}, checkpoint_id="runs/checkpoint-500")
dcp.save({"model": model.state_dict()}, checkpoint_id="runs/checkpoint-500")
import safetensors
safetensors.serialize_file({}, "read-only/keep.pt")
safetensors.serialize_file({}, filename=Path("runs/events.out.tfevents.1"))
dist.destroy_process_group()
"""
NO_EVENT = """
import ctypes, os
def serialize_file(tensors, filename, metadata=None):  # as one that is written in Rust
    ctypes.CDLL(None).close(ctypes.CDLL(None).creat(os.fsencode(filename), 0o644))
"""


def test_writers_that_are_not_python(guarded: Guarded, tmp_path: Path) -> None:
    fill(guarded.work)
    (tmp_path / "safetensors.py").write_text(NO_EVENT)
    before = state(guarded.work)
    guarded.run(f"import sys\nsys.path.append({str(tmp_path)!r})\n" + MODULES + WRITERS)
    changed = state(guarded.work)
    for name in OLD:
        assert changed.get(name) != before[name] or name == "data.db", name
    after = restored(guarded)
    assert {path: after.get(path) for path in before} == before
    assert {path for path in after if path not in before} == {*changed} - {*before}


REFUSED = {
    "the disk is full": """
shutil.disk_usage = lambda path: os.statvfs_result  # as below
shutil.disk_usage = lambda path: type("Usage", (), {"free": 10})
open("last.ckpt", "w")""",
    "links and copies fail": """
os.link = shutil.disk_usage = lambda *a, **k: (_ for _ in ()).throw(OSError(1, "no"))
os.remove("last.ckpt")""",
    "a command in a command": 'os.system("rm $(echo last.ckpt)")',
    "an unknown variable": 'os.system("echo x > $UNKNOWN_FOLDER/last.ckpt")',
    "xargs": 'os.system("ls | xargs rm -r")',
    "the vault has gone": 'shutil.rmtree(os.environ["DDP_DOCTOR_VAULT"]); os.remove("last.ckpt")',
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_put_away_is_not_done(guarded: Guarded, name: str) -> None:
    fill(guarded.work)
    before = state(guarded.work)
    guarded.run("print('begun')\n" + MODULES + REFUSED[name] + "\nopen('late', 'w')", status=2)
    assert (guarded.notes / "refused").read_text().count("\n") == 1
    assert state(guarded.work) == before


def test_what_may_not_be_done_fails_as_it_does_without(guarded: Guarded) -> None:
    fill(guarded.work)
    program = """
for act in (
    lambda: os.remove("missing"),
    lambda: open("no-folder/x", "w"),
    lambda: os.rename("missing", "last.ckpt"),
    lambda: os.rmdir("runs"),
    lambda: open("runs", "w"),
    lambda: os.remove("runs"),
    lambda: os.rename("last.ckpt", "runs"),
    lambda: open("last.ckpt", "x"),
    lambda: os.open("last.ckpt", os.O_CREAT | os.O_EXCL | os.O_WRONLY),
    lambda: os.chmod("missing", 0),
    lambda: os.link("last.ckpt", "logs/train.log"),
    lambda: subprocess.run(["no-such-command", "last.ckpt"]),
    lambda: open("x" * 999, "w"),
    lambda: [open("/proc/self/comm", "w").write("me"), open("/dev/null", "w"), os.listdir("no")],
    lambda: [os.mkdir("gone"), os.chdir("gone"), os.rmdir("../gone"), open("y", "w")],
    lambda: os.remove("last.ckpt"),
):
    try:
        act()
    except OSError as error:
        print(error)
"""
    before = state(guarded.work)
    said = guarded.run(MODULES + program)
    plain = subprocess.run(
        [sys.executable, "-c", MODULES + program], cwd=guarded.work, capture_output=True, text=True
    )
    assert said.splitlines()[: len(plain.stdout.splitlines())] == plain.stdout.splitlines()
    assert plain.stdout.count("\n") == 16
    assert state(guarded.work) == before == restored(guarded)


def test_large_files_are_not_copied(guarded: Guarded) -> None:
    fill(guarded.work)
    before = state(guarded.work)
    program = """
import ddp_doctor.vault
ddp_doctor.vault.SMALL = 100
own = os.stat("runs/checkpoint-500/model.pt").st_ino
ddp_doctor.vault.SMALL = 3
open("runs/checkpoint-500/model.pt", "w").write("new")
assert os.stat("runs/checkpoint-500/model.pt").st_ino != own
own = os.stat("empty.lock").st_ino
open("empty.lock", "w").write("123")
assert os.stat("empty.lock").st_ino == own
"""
    guarded.run(MODULES + program)
    after = restored(guarded)
    assert after == before


ACTS: dict[str, tuple[Callable, Callable]] = {
    "write": (lambda v, p: v.before_write(p, True), lambda p: Path(p).write_text("new")),
    "change": (lambda v, p: v.before_write(p, False), lambda p: os.truncate(p, 3)),
    "remove": (lambda v, p: v.before_remove(p), os.remove),
    "rename": (lambda v, p: v.before_rename(p, p + ".1"), lambda p: os.rename(p, p + ".1")),
    "replace": (lambda v, p: v.before_rename(p + ".t", p), lambda p: os.rename(p + ".t", p)),
}


@pytest.mark.parametrize("first", ACTS)
@pytest.mark.parametrize("second", ACTS)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("small", [0, 1000])
def test_two_ranks_at_the_same_moment(
    guarded: Guarded, first: str, second: str, swapped: bool, small: int
) -> None:
    """Both are about to act before either of them has acted."""
    fill(guarded.work)
    before = state(guarded.work)
    os.environ["DDP_DOCTOR_START"] = guarded.environment()["DDP_DOCTOR_START"]
    path = str(guarded.work / "logs" / "train.log")
    Path(path + ".t").write_text("newer")
    with mock.patch("ddp_doctor.vault.SMALL", small):
        for name in (first, second):
            ACTS[name][0](Vault(str(guarded.home)), path)
    for name in (second, first) if swapped else (first, second):
        with contextlib.suppress(FileNotFoundError):
            ACTS[name][1](path)
    after = restored(guarded)
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize("order", [1, -1])
def test_two_machines_on_the_same_files(guarded: Guarded, order: int) -> None:
    fill(guarded.work)
    before = state(guarded.work)
    guarded.environment()
    guarded.more["DDP_DOCTOR_SHARED"] = "1"
    homes = [guarded.home, make_home(guarded.work)]
    for home, content in zip(homes, ("one", "two"), strict=True):
        guarded.home = home
        guarded.run(f"open('last.ckpt', 'w').write('{content}')")
        guarded.run(f"open('logs/train.log', 'a').write('{content}')")
    for home in homes[::order]:
        guarded.home = home
        after = restored(guarded)
    assert after == before
