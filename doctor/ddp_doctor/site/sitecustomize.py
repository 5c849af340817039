"""Python imports this in every process below the doctor, because its folder is on PYTHONPATH.

It installs the guard of the files, and imports the watcher as soon as the process has imported
torch. The processes of torchrun itself are guarded, but not watched.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType

here = os.path.dirname(os.path.abspath(__file__))
package = os.path.dirname(os.path.dirname(here))


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """The program's sys.path is as it would be without the doctor, except while it is imported."""
    added = package not in sys.path
    sys.path += [package] * added
    try:
        yield
    finally:
        if added:
            sys.path.remove(package)


def watch(torch: ModuleType) -> None:
    try:
        with reachable():
            import ddp_doctor.watch  # noqa: F401
    except Exception as error:  # of the doctor, and not of the program, which goes on
        with open(os.path.join(os.environ["DDP_DOCTOR_FOLDER"], "failed"), "a") as file:
            file.write(f"watch: {type(error).__name__}: {error}\n")


def begin() -> None:
    with reachable():
        from ddp_doctor import guard

    own = guard.install(os.environ["DDP_DOCTOR_FOLDER"], os.environ["DDP_DOCTOR_VAULT"])
    modules = {name: [own.wrap] for name in guard.NATIVE}
    words = sys.orig_argv[:4]
    if not any(word.endswith(("torchrun", "torch.distributed.run")) for word in words):
        modules["torch"].append(watch)
    sys.meta_path.insert(0, guard.Importer(modules))


if here in sys.path:
    sys.path.remove(here)
if os.path.isdir(os.environ.get("DDP_DOCTOR_VAULT", "")):
    begin()
if following := PathFinder.find_spec("sitecustomize"):  # the machine may have one of its own
    following.loader.exec_module(module_from_spec(following))  # type: ignore[union-attr]
