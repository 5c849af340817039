"""Python imports this file in every process that doctor.py starts: its folder is on PYTHONPATH.

As soon as such a process has imported torch, it also imports doctor_watch.py.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

here = Path(__file__).parent


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), watch())
        return spec


def watch() -> None:
    sys.path.append(str(here.parent))
    import doctor_watch  # noqa: F401

    sys.path.remove(str(here.parent))


launcher = any(word.endswith(("torchrun", "torch.distributed.run")) for word in sys.orig_argv[:4])
if "DOCTOR_FOLDER" in os.environ and not launcher:
    sys.meta_path.insert(0, Finder())
sys.path.remove(str(here))
if following := PathFinder.find_spec("sitecustomize"):  # the machine may have one of its own
    following.loader.exec_module(module_from_spec(following))
