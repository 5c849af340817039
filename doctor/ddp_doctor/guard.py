"""Sees each act of a Python process that destroys a file before it happens, and puts it away.

The interpreter raises audit events for these acts, whichever library asks for them. Libraries that
write in C++ or Rust raise none, so their functions are wrapped as soon as they are imported.
"""

import contextlib
import fcntl
import functools
import os
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple
from urllib.parse import unquote

from ddp_doctor import commands
from ddp_doctor.disk import NAME
from ddp_doctor.vault import Refused, Vault

WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND


class Writer(NamedTuple):
    """A function that writes without an audit event."""

    name: str
    number: int  # which argument is the path
    empties: bool = False
    mode: tuple[int, str] = (99, "")  # the argument, its number and its name, that says how
    reads: tuple = ()  # and its values with which it only reads


NATIVE = {
    "torch": [
        Writer("_C.PyTorchFileWriter.__init__", 1, True),
        Writer("_C.ScriptModule.save", 1, True),
        Writer("_C._autograd._ProfilerResult.save", 1, True),
        Writer("_C._distributed_c10d.FileStore.__init__", 1),
        Writer("from_file", 0, False, (1, "shared"), (None, False)),
        Writer("UntypedStorage.from_file", 0, False, (1, "shared"), (None, False)),
    ],
    "safetensors": [Writer("serialize_file", 1, True)],
    "tokenizers": [Writer("Tokenizer.save", 1, True)],
    "h5py._hl.files": [Writer("File.__init__", 1, False, (2, "mode"), (None, "r"))],
    "_gdbm": [Writer("open", 0, False, (1, "flag"), (None, "r"))],
    "_dbm": [Writer("open", 0, False, (1, "flag"), (None, "r"))],
    "lmdb": [Writer("open", 0, False, (4, "readonly"), (True,))],
    "cv2": [Writer("imwrite", 0, True)],
    "soundfile": [Writer("write", 0, True)],
    "pyarrow.lib": [Writer("memory_map", 0, False, (1, "mode"), (None, "r"))],
    "pyarrow.parquet.core": [Writer("ParquetWriter.__init__", 1, True)],
    "faiss.swigfaiss": [Writer("write_index", 1, True)],
}


class Guard:
    def __init__(self, folder: str, home: str) -> None:
        self.folder, self.home, self.vault = folder, home, Vault(home)
        self.here = threading.local()  # of a thread: whether it is in here, and a folder to open in
        self.told = False
        alive = os.open(os.path.join(home, "alive"), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(alive, fcntl.LOCK_SH)  # until the process and its forks end
        keep = self.vault
        self.acts: dict[str, Callable] = {
            "open": self.opened,
            "os.remove": lambda path, fd: keep.before_remove(absolute(path, fd)),
            "os.rmdir": lambda path, fd: keep.before_rmdir(absolute(path, fd)),
            "os.rename": self.renamed,
            "os.link": self.linked,
            "os.mkdir": lambda path, mode, fd: keep.before_mkdir(absolute(path, fd)),
            "os.truncate": lambda path, size: keep.before_write(absolute(path), False),
            "os.chmod": lambda path, mode, fd: keep.before_change(absolute(path, fd)),
            "os.chown": lambda path, user, group, fd: keep.before_change(absolute(path, fd)),
            "os.utime": lambda path, times, ns, fd: keep.before_change(absolute(path, fd)),
            "sqlite3.connect": self.connected,
            "subprocess.Popen": lambda program, words, cwd, env: self.command(words, cwd),
            "os.system": lambda line: self.command(line, None),
            "os.exec": lambda path, words, env: self.command(words, None),
            "os.posix_spawn": lambda path, words, env: self.command(words, None),
            "pty.spawn": lambda words: self.command(words, None),
        }

    def audit(self, event: str, args: tuple) -> None:
        act = self.acts.get(event)
        if act is None or getattr(self.here, "busy", False):
            return
        if event == "open" and not args[2] & WRITES:
            return
        self.perform(act, *args)

    def perform(self, act: Callable, *args: object) -> None:
        """Put away what an act would destroy, or end this process before the act."""
        self.here.busy = True
        try:
            act(*args)
        except Refused as why:
            self.refuse(f"the program is stopped before it destroys something: {why}")
        except Exception as error:
            if sys.is_finalizing():
                return
            self.refuse(f"the doctor failed: guard: {type(error).__name__}: {error}")
        finally:
            self.here.busy = False
        if self.vault.kept and not self.told:
            self.tell()

    def tell(self) -> None:
        """Where the originals are. The first process of a run that puts something away says it."""
        self.told = True
        self.here.busy = True
        with contextlib.suppress(OSError):
            os.close(os.open(os.path.join(self.home, "told"), os.O_CREAT | os.O_EXCL | os.O_RDWR))
            line = (
                "doctor: what the program changes is put back at the end (if the doctor is killed"
            )
            os.write(2, f"{line}, by: ddp-doctor restore {self.home})\n".encode())
        self.here.busy = False

    def refuse(self, why: str) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with open(os.path.join(self.folder, "refused"), "a") as file:
            file.write(why + "\n")
        os._exit(2)

    # --- acts whose events need a closer look
    def opened(self, path: object, mode: str | None, flags: int) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # a descriptor, of which the event has been seen
        if flags & os.O_CREAT and flags & os.O_EXCL:
            return
        folder = getattr(self.here, "folder", -1) if mode is None else -1
        self.vault.before_write(self.outside(absolute(path, folder)), bool(flags & os.O_TRUNC))

    def outside(self, path: str) -> str:
        return f"/{NAME}/nothing" if path.startswith(self.folder) or f"/{NAME}/" in path else path

    def renamed(self, old: object, new: object, old_folder: int, new_folder: int) -> None:
        self.vault.before_rename(absolute(old, old_folder), absolute(new, new_folder))

    def linked(self, old: object, new: object, old_folder: int, new_folder: int) -> None:
        self.vault.before_link(absolute(old, old_folder), absolute(new, new_folder))

    def connected(self, path: object) -> None:
        name = os.fsdecode(os.fspath(path)) if not isinstance(path, str) else path
        if name.startswith("file:"):
            name = unquote(name[5:].split("?")[0])
            name = "/" + name.lstrip("/") if name.startswith("//") else name
        if name and name != ":memory:":
            for end in ("", "-journal", "-wal", "-shm"):
                self.vault.before_write(absolute(name + end), False)

    def command(self, words: object, cwd: object) -> None:
        commands.before(self.vault, words, os.fsdecode(os.fspath(cwd)) if cwd else os.getcwd())

    # --- what raises no event
    def wrap(self, module: ModuleType) -> None:
        for writer in NATIVE[module.__name__]:
            with contextlib.suppress(AttributeError, TypeError):
                *names, last = writer.name.split(".")
                owner = functools.reduce(getattr, names, module)
                setattr(owner, last, self.wrapped(getattr(owner, last), writer))

    def wrapped(self, original: Callable, writer: Writer) -> Callable:
        number, name = writer.mode

        @functools.wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            mode = args[number] if len(args) > number else kwargs.get(name)
            if not any(mode is value or mode == value for value in writer.reads):
                for path in args[writer.number : writer.number + 1] or kwargs.values():
                    self.native(path, writer.empties)
            return original(*args, **kwargs)

        return call

    def native(self, given: object, empties: bool) -> None:
        if isinstance(given, (str, bytes, os.PathLike)) and not getattr(self.here, "busy", False):
            path = self.outside(absolute(given))
            if os.path.isdir(path):
                self.perform(self.vault.before_tree, path, "write")
            else:
                self.perform(self.vault.before_write, path, empties)

    def open_in(self, original: Callable) -> Callable:
        """os.open tells its audit event nothing of the folder that it is given."""

        @functools.wraps(original)
        def open(path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is None:
                return original(path, flags, mode)
            self.here.folder = dir_fd
            try:
                return original(path, flags, mode, dir_fd=dir_fd)
            finally:
                self.here.folder = -1

        os.supports_dir_fd.add(open)
        return open


class Importer(MetaPathFinder):
    """Calls a function with each of these modules when it is imported."""

    def __init__(self, names: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name not in self.names:
            return None
        functions = self.names.pop(name)
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec), None)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for function in functions:
                    function(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def absolute(path: object, folder: int = -1) -> str:
    """The path itself may be a symbolic link, but none of its folders is one."""
    if isinstance(path, int):
        return descriptor(path)
    name = os.fsdecode(os.fspath(path))  # type: ignore[arg-type]
    if folder is not None and folder >= 0 and not os.path.isabs(name):
        name = os.path.join(descriptor(folder), name)
    try:
        parent, base = os.path.split(os.path.abspath(name))
    except FileNotFoundError:  # the working folder has gone, so the act will fail
        return f"/{NAME}/nothing"
    return os.path.join(os.path.realpath(parent), base)


def descriptor(number: int) -> str:
    if sys.platform == "darwin":
        return os.fsdecode(fcntl.fcntl(number, 50, bytes(1024)).rstrip(b"\0"))  # F_GETPATH
    return os.readlink(f"/proc/self/fd/{number}")


def install(folder: str, home: str) -> Guard:
    guard = Guard(folder, home)
    os.open = guard.open_in(os.open)
    os.register_at_fork(after_in_child=guard.vault.after_fork)
    sys.addaudithook(guard.audit)
    return guard
