"""What the doctor asks of file systems: who, when, where, and copies. Standard library only."""

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import platform
import shutil
import struct
import tempfile
import time
from pathlib import Path

NAME = ".ddp-doctor"  # the folder in which vaults lie, next to what they hold
Key = tuple[int, int]  # the device and the inode of a file


def key(own: os.stat_result) -> Key:
    return own.st_dev, own.st_ino


def facts(own: os.stat_result) -> dict:
    times = [own.st_atime_ns, own.st_mtime_ns]
    owner = [own.st_uid, own.st_gid]
    return {"inode": key(own), "mode": own.st_mode, "owner": owner, "times": times}


def set_owner(path: str, user: int, group: int) -> None:
    own = os.lstat(path)
    if (own.st_uid, own.st_gid) != (user, group):
        with contextlib.suppress(PermissionError):
            os.chown(path, user, group, follow_symlinks=False)


def copy_bytes(source: str, to: str) -> None:
    """By reference, where the file system can."""
    with open(source, "rb") as old, open(to, "wb") as new:
        with contextlib.suppress(OSError, AttributeError):
            while os.copy_file_range(old.fileno(), new.fileno(), 1 << 30):
                pass
        old.seek(os.lseek(new.fileno(), 0, os.SEEK_CUR))
        shutil.copyfileobj(old, new, 1 << 20)


def ancestors(path: str, device: int) -> list[str]:
    """The folders above on the same disk in which we may write: home first, then the topmost."""
    found, parent = [], os.path.dirname(path)
    while True:
        with contextlib.suppress(OSError):
            if os.stat(parent).st_dev != device:
                break
            if os.access(parent, os.W_OK | os.X_OK):
                found.insert(0, parent)
        if parent == os.path.dirname(parent):
            break
        parent = os.path.dirname(parent)
    home = os.path.expanduser("~")
    return sorted(found, key=lambda folder: folder != home)


def make_folder(folder: str) -> float:
    """The time at which it was made, by the clock of its disk."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return os.stat(folder).st_ctime


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def birth(path: str, own: os.stat_result) -> float | None:
    """When a file was made, if its file system knows."""
    if hasattr(own, "st_birthtime"):
        return own.st_birthtime
    result = ctypes.create_string_buffer(256)
    no_follow, btime = 0x100, 0x800
    try:
        if libc().statx(-100, os.fsencode(path), no_follow, btime, result):
            return None
    except (AttributeError, OSError):
        return None
    if not struct.unpack_from("I", result, 0)[0] & btime:
        return None
    seconds, nanoseconds = struct.unpack_from("qI", result, 0x50)
    return seconds + nanoseconds / 1e9


def make_home(folder: Path) -> Path:
    """The first vault of a run, with its journal, where a run in this folder finds it again."""
    name = f"{platform.node()}-{os.getpid()}-{time.time_ns() // 1_000_000}"
    device = os.stat(folder).st_dev
    for parent in (*ancestors(str(folder.resolve() / "x"), device), tempfile.gettempdir()):
        home = Path(parent, NAME, name)
        try:
            start = make_folder(str(home))
            with open(home / "journal.jsonl", "x") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # some file systems have no locks
                own = {"op": "vault", "path": str(home), "device": os.stat(home).st_dev}
                own |= {"start": start, "for": str(folder.resolve())}
                file.write(json.dumps(own) + "\n")
            return home
        except OSError:
            shutil.rmtree(home, ignore_errors=True)
    raise OSError(errno.EACCES, f"there is no folder on the way to {folder} to write in")
