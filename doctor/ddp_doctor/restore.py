"""Undoes what a journal of vault.py says, so that all is there that was there before the run.

It can be interrupted and repeated: each step looks at what is there, and the vaults are removed
only when all steps are done and the journal says so.
"""

import contextlib
import fcntl
import filecmp
import json
import os
import shutil
import stat
from collections import defaultdict
from pathlib import Path
from typing import TextIO

from ddp_doctor.disk import NAME, birth, copy_bytes, key, set_owner


class Undo:
    def __init__(self, home: Path) -> None:
        self.home, self.journal = home, home / "journal.jsonl"
        text = self.journal.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        self.records = [json.loads(line) for line in lines]
        self.vaults = [Path(r["path"]) for r in self.records if r["op"] == "vault"]
        self.start = self.records[0]["start"]
        self.undone = {r["number"] for r in self.records if r["op"] == "undone"}
        # Where an inode was put or renamed to, and the one that has been made anew in its place.
        self.moved: dict[tuple, list[str]] = defaultdict(list)
        self.anew: dict[tuple, tuple] = {}
        self.made = {r["path"] for r in self.records if "source" in r}  # links, by the program
        for record in self.records:
            for name in ("vault", "to", "source"):
                if name in record:
                    self.moved[tuple(record["inode"])].append(record[name])
            if record["op"] == "undone":
                self.anew[tuple(record["inode"])] = tuple(record["anew"])
        self.said: list[str] = []
        self.failed: list[str] = []

    def run(self) -> None:
        if not any(record["op"] == "done" for record in self.records):
            with self.journal.open("a") as file:
                for number in reversed(range(len(self.records))):
                    if number not in self.undone:
                        self.step(number, file)
                if self.failed:
                    return
                file.write('{"op": "done"}\n')
        self.clean()

    def step(self, number: int, file: TextIO) -> None:
        record = self.records[number]
        if record["op"] not in ("link", "copy", "symlink", "rename", "rmdir", "stat"):
            return
        try:
            there = getattr(self, record["op"])(record)
        except OSError as error:
            self.failed.append(f"{record['path']} is not restored: {error}")
            return
        own = tuple(record["inode"])
        anew = self.anew.get(own, own)
        if there:  # and not a new file, where another rank was first
            anew = self.anew[own] = inode(record["path"]) or own
        line = {"op": "undone", "number": number, "inode": own, "anew": anew}
        file.write(json.dumps(line) + "\n")
        file.flush()

    def clean(self) -> None:
        for vault in self.vaults:
            if vault != self.home and vault.parent.name == NAME:
                shutil.rmtree(vault, ignore_errors=True)
        for name in os.listdir(self.home):
            if name != self.journal.name:
                (self.home / name).unlink()
        self.journal.unlink()  # last, because it leads to the others
        for vault in self.vaults:
            for folder in (vault, vault.parent):  # .ddp-doctor, unless another run has one there
                with contextlib.suppress(OSError):
                    folder.rmdir()

    # --- one method for each kind of record, which says whether its file is at the path again
    def link(self, record: dict) -> bool:
        path, vault = record["path"], record["vault"]
        if os.path.lexists(vault):
            if inode(path) != inode(vault):
                self.make_way(path)
                place(vault, path)
            self.attributes(path, record)
            return True
        return False

    def copy(self, record: dict) -> bool:
        path, vault, own = record["path"], record["vault"], tuple(record["inode"])
        if not os.path.exists(vault):
            return False
        # Where the file itself is now: there, in a vault, or where another rank has moved it.
        now = next((p for p in [path, *self.moved[own]] if self.is_it(p, own)), None)
        if now:
            rewrite(vault, now, record)
            self.attributes(now, record)
        if now != path and not (now and path in self.made):
            self.make_way(path)
            place(now, path) if now else copy_bytes(vault, path)
            now = path
        self.attributes(path, record)
        return now == path

    def symlink(self, record: dict) -> bool:
        path, target = record["path"], record["target"]
        if not os.path.islink(path) or os.readlink(path) != target:
            self.make_way(path)
            os.symlink(target, path)
            set_owner(path, *record["owner"])
        return True

    def rename(self, record: dict) -> bool:
        path, to, own = record["path"], record["to"], tuple(record["inode"])
        if self.is_it(to, own) and self.is_it(path, own) and not os.path.isdir(to):
            os.remove(to)  # another step has put it back already
        elif self.is_it(to, own):
            self.make_way(path)
            os.rename(to, path)
        return self.is_it(path, own)

    def rmdir(self, record: dict) -> bool:
        if not os.path.isdir(record["path"]) or os.path.islink(record["path"]):
            self.make_way(record["path"])
            self.folder(record["path"])
        self.attributes(record["path"], record)
        return True

    def stat(self, record: dict) -> bool:
        if self.is_it(record["path"], tuple(record["inode"])):
            self.attributes(record["path"], record)
        return False

    # --- their parts
    def is_it(self, path: str, own: tuple) -> bool:
        return inode(path) in (own, self.anew.get(own, own))

    def make_way(self, path: str) -> None:
        """Remove a new file; keep a new folder, and what the run cannot have made, by its side."""
        self.folder(os.path.dirname(path))
        if not os.path.lexists(path):
            return
        own = os.lstat(path)
        born = birth(path, own)
        if stat.S_ISDIR(own.st_mode) or (own.st_nlink == 1 and (born or own.st_ctime) < self.start):
            aside, number = f"{path}.new", 0
            while os.path.lexists(aside):
                number += 1
                aside = f"{path}.new{number}"
            os.rename(path, aside)
            self.said.append(f"{aside} is what the program has put in the place of {path}")
        else:
            os.remove(path)

    def folder(self, path: str) -> None:
        """Make it, or bring it back, if another rank has renamed it just before the act."""
        if not os.path.isdir(path):
            self.folder(os.path.dirname(path))
            renamed = [
                (r["to"], tuple(r["inode"]))
                for r in self.records
                if r["op"] == "rename" and r["path"] == path
            ]
            now = next((to for to, own in renamed if self.is_it(to, own)), None)
            if now:
                os.rename(now, path)
            else:
                os.mkdir(path)

    def attributes(self, path: str, record: dict) -> None:
        if not os.path.lexists(path) or os.path.islink(path):
            return
        set_owner(path, *record["owner"])
        if os.stat(path).st_mode != record["mode"]:
            os.chmod(path, stat.S_IMODE(record["mode"]))
        if not os.path.isdir(path):
            os.utime(path, ns=tuple(record["times"]))


def inode(path: str) -> tuple[int, int] | None:
    try:
        return key(os.lstat(path))
    except OSError:
        return None


def place(source: str, to: str) -> None:
    """A second name, or a copy where there are none."""
    try:
        os.link(source, to)
    except OSError:
        copy_bytes(source, to)


def rewrite(source: str, to: str, record: dict) -> None:
    """What the file holds, and not the file, because it may have other names and be locked."""
    if not filecmp.cmp(source, to, shallow=False):
        os.chmod(to, stat.S_IMODE(record["mode"]) | stat.S_IWUSR)
        with open(source, "rb") as old, open(to, "r+b") as new:
            shutil.copyfileobj(old, new, 1 << 20)
            new.truncate()


def is_free(home: Path) -> bool:
    """Whether no process of the run lives any more: each one holds a lock on this file."""
    try:
        with open(home / "alive") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except FileNotFoundError:
        return True
    except OSError:
        return False


def leftovers(folder: Path) -> list[Path]:
    """The vaults of runs in this folder that were ended before they could restore."""
    folder, found = folder.resolve(), []
    places = [parent / NAME for parent in (folder, *folder.parents)]
    for journal in [j for place in places for j in sorted(place.glob("*/journal.jsonl"))]:
        with contextlib.suppress(OSError, ValueError, KeyError):
            own = Path(json.loads(journal.open().readline())["for"])
            related = own == folder or own in folder.parents or folder in own.parents
            if related and is_free(journal.parent):
                found.append(journal.parent)
    return found
