"""Puts away what was there before the run, before the program changes it.

A journal of JSON lines says what was put away, and restore.py undoes them in reverse order. All
processes of a run share it, one at a time. Whatever cannot be put away raises Refused.
"""

import contextlib
import errno
import functools
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator

from ddp_doctor import disk
from ddp_doctor.disk import NAME, birth, key
from ddp_doctor.journal import Journal, Refused

SMALL = 64 << 20  # bytes: a larger file that is about to be emptied is moved aside, not copied
SPARE = 64 << 20  # bytes that stay free on a disk to which something is copied
LARGE = 1 << 30  # bytes, of which copying takes so long that it is said
NO_FILES = ("/proc/", "/sys/")


class Moved(Exception):
    """Another rank has put something else there meanwhile, by an act that was noted before."""


def again(act: Callable) -> Callable:
    @functools.wraps(act)
    def acted(self: "Vault", path: str, *args: object, **kwargs: object) -> None:
        for _ in range(1000):
            with contextlib.suppress(Moved):
                return act(self, path, *args, **kwargs)
        raise Refused(f"{path} is changed all the time")

    return acted


class Vault(Journal):
    """The vaults of a run, one on each file system, and its journal in the first one, `home`."""

    # --- what was there before
    def was_there(self, path: str, own: os.stat_result) -> bool:
        if key(own) in self.known:
            return True
        start = self.start(path, own)
        if own.st_ctime <= start:
            return True
        born = birth(path, own)
        if born is not None:
            return born <= start
        # A new file in a folder changes the folder's time, and a network's disk knows no births.
        return stat.S_ISDIR(own.st_mode) and path not in self.made

    def start(self, path: str, own: os.stat_result) -> float:
        """When the run began, by the clock of the file's own disk."""
        start = self.starts.get(own.st_dev, self.begun)
        if own.st_dev not in self.starts and abs(own.st_ctime - start) < 3600:
            next(self.places(path, own.st_dev), None)
            start = self.starts.get(own.st_dev, start)
        return start

    # --- where things are put
    def places(self, path: str, device: int) -> Iterator[str]:
        """Folders on the file's own disk. With bind mounts, not every one serves it."""
        yield from self.folders.get(device, [])
        for parent in disk.ancestors(path, device):
            folder = os.path.join(parent, NAME, os.path.basename(self.home))
            if folder not in self.folders.get(device, []):
                with contextlib.suppress(OSError):
                    start = self.begun + disk.make_folder(folder) - time.time()
                    self.note("vault", path=folder, device=device, start=start)
                    yield folder

    def free_name(self, folder: str) -> str:
        """A process that was killed may have left something that the journal does not know."""
        target = os.path.join(folder, str(self.count))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        return target

    def link(self, path: str, own: os.stat_result) -> str | None:
        for folder in self.places(path, own.st_dev):
            target = self.free_name(folder)
            try:
                os.link(path, target)
            except OSError as error:
                if not os.path.lexists(path):
                    raise Moved from error
                if error.errno == errno.EXDEV:
                    continue
                return None
            self.same(target, own, target)
            self.note("link", path=path, vault=target, **disk.facts(own))
            return target
        return None

    def same(self, path: str, own: os.stat_result, target: str) -> None:
        if key(os.lstat(path)) != key(own):
            os.unlink(target)
            raise Moved

    def copy(self, path: str, own: os.stat_result, goes: bool = False) -> None:
        for folder in (next(self.places(path, own.st_dev), self.home), self.home):
            target = self.free_name(folder)
            if shutil.disk_usage(folder).free < own.st_size + SPARE:
                continue
            if own.st_size > LARGE:
                os.write(2, f"doctor: {path} is copied before it is changed\n".encode())
            try:
                disk.copy_bytes(path, target)
                self.same(path, own, target)
            except OSError as error:
                if not os.path.lexists(path):
                    raise Moved from error
                raise Refused(f"{path} cannot be copied: {error.strerror}") from error
            self.note("copy", path=path, vault=target, goes=goes, **disk.facts(own))
            return
        raise Refused(f"there is no space to put {path} away ({own.st_size / 1e6:.0f} MB)")

    # --- before the program acts. The paths are absolute, and without symbolic links in the folders
    @again
    def before_write(self, path: str, empties: bool) -> None:
        """The file is opened for writing."""
        path = os.path.realpath(path)
        with self.existing(path) as own:
            if not own or not stat.S_ISREG(own.st_mode) or not os.access(path, os.W_OK):
                return
            if key(own) in self.copied or self.is_others(path, own):
                return
            # Lock files must stay the same file for all processes, so a small one stays in place.
            if not (
                empties and own.st_size > SMALL and own.st_nlink == 1 and self.aside(path, own)
            ):
                self.copy(path, own)

    def is_others(self, path: str, own: os.stat_result) -> bool:
        """Whether another machine's rank has changed it before: its doctor has the original."""
        world = int(os.environ.get("WORLD_SIZE", 1))
        several = world > int(os.environ.get("LOCAL_WORLD_SIZE", world))
        several = several or "DDP_DOCTOR_SHARED" in os.environ
        return several and key(own) not in self.known and own.st_mtime > self.start(path, own)

    def aside(self, path: str, own: os.stat_result) -> bool:
        """An empty file with the same owner and mode takes the place of a large one."""
        if not os.access(os.path.dirname(path), os.W_OK):
            return False
        target = self.link(path, own)
        if target is None:
            return False
        with contextlib.suppress(OSError):
            empty = target + ".empty"
            os.close(os.open(empty, os.O_CREAT | os.O_EXCL, 0o600))
            disk.set_owner(empty, own.st_uid, own.st_gid)
            os.chmod(empty, stat.S_IMODE(own.st_mode))
            os.rename(empty, path)
            return True
        return False

    @again
    def before_remove(self, path: str) -> None:
        with self.existing(path) as own:
            if not own or path in self.made or not os.access(os.path.dirname(path), os.W_OK):
                return
            if stat.S_ISLNK(own.st_mode):
                target = os.readlink(path)
                self.note("symlink", path=path, target=target, goes=True, **disk.facts(own))
            elif not stat.S_ISDIR(own.st_mode) and not self.link(path, own):
                if not stat.S_ISREG(own.st_mode):
                    raise Refused(f"{path} is no regular file, and cannot be put away")
                self.copy(path, own, goes=True)

    def before_rmdir(self, path: str) -> None:
        with self.existing(path) as own:
            if own and stat.S_ISDIR(own.st_mode):
                self.note("rmdir", path=path, goes=True, **disk.facts(own))

    def before_rename(self, source: str, to: str) -> None:
        with self.locked():
            try:
                own = os.lstat(source)
            except OSError:
                return
            with contextlib.suppress(OSError):
                if key(os.lstat(to)) == key(own):
                    return
                self.before_remove(to)
                self.before_rmdir(to)
            inside = source + os.sep
            holds = any(path.startswith(inside) for path in self.held)
            if source in self.made and not holds:
                self.note("made", path=to)
            elif holds or self.was_there(source, own):
                self.note("rename", path=source, to=to, **disk.facts(own))

    def before_change(self, path: str) -> None:
        """Its mode, its owner or its times are changed."""
        path = os.path.realpath(path)
        with self.existing(path) as own:
            if own and key(own) not in self.noted:
                self.note("stat", path=path, **disk.facts(own))

    def before_tree(self, path: str, act: str) -> None:
        """Something that is no Python does this with a whole folder: remove, or write."""
        if os.path.isdir(path) and not os.path.islink(path):
            for folder, folders, files in os.walk(path, topdown=False):
                for name in files + [n for n in folders if os.path.islink(os.path.join(folder, n))]:
                    self.before_tree(os.path.join(folder, name), act)
                self.before_rmdir(folder)
            return
        if act == "remove" or os.path.islink(path):
            self.before_remove(path)
        if act == "write":
            self.before_write(path, empties=False)

    def before_mkdir(self, path: str) -> None:
        parent = os.path.dirname(path)
        if os.path.isdir(parent) and not os.path.lexists(path):
            if birth(parent, os.lstat(parent)) is not None:
                return  # the folder will be seen to be new
            with self.locked():
                self.note("made", path=path)

    def before_link(self, source: str, to: str) -> None:
        """A new name of an old file, whose time of change becomes new."""
        with self.existing(source) as own:
            if own and not os.path.lexists(to):
                self.note("made", path=to, source=source, **disk.facts(own))

    @contextlib.contextmanager
    def existing(self, path: str) -> Iterator[os.stat_result | None]:
        """What is there, if it was there before the run. Others wait as long as it is looked at."""
        if path.startswith(NO_FILES) or not os.path.lexists(path):
            yield None
            return
        with self.locked():
            try:
                own = os.lstat(path)
            except OSError:
                own = None
            yield own if own and self.was_there(path, own) else None
