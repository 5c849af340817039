"""What is saved and loaded. (guard.py protects the files.)"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ddp_doctor.watch.hooks import Raised, around, careful, where
from ddp_doctor.watch.models import M
from ddp_doctor.watch.note import note
from ddp_doctor.watch.optimizers import OPT


@around(torch, "save")
def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    noted(obj, f)
    yield


@careful
def noted(obj: Any, f: Any) -> None:
    path = os.path.abspath(os.fspath(f)) if is_path(f) else getattr(f, "name", None)
    parts = [*dicts(obj)]
    keys = {str(key) for part in parts for key in part}
    states = [bool(part.get("state")) for part in parts if "param_groups" in part]
    stateless = not any(optimizer.state for optimizer in OPT.made)
    inner = {name for model in M.live() for name in model.module.state_dict()}
    keys -= {n for m in M.averages for n in m.state_dict() if n.startswith("module.")}
    prefixed = sorted(k for k in keys - inner if k.startswith("module.") and k[7:] in inner)
    facts = {
        "path": path if isinstance(path, str) else None,
        "prefixed": prefixed[:1],
        "optimizer": any(states) or (bool(states) and stateless),
        "model": bool(prefixed or inner & keys),
    }
    note("save", **facts, where=where())


@around(torch, "load")
def load(f: Any, *args: Any, **kwargs: Any) -> Any:
    found = yield
    if not isinstance(found, Raised):
        devices = {leaf.device for leaf in tree_leaves(found) if torch.is_tensor(leaf)}
        own = None
        if torch.accelerator.is_available():
            own = torch.accelerator.current_device_index()
        others = [d for d in devices if d.type not in ("cpu", "meta") and d.index != own]
        path = os.path.abspath(os.fspath(f)) if is_path(f) else getattr(f, "name", None)
        facts = {"path": path if isinstance(path, str) else None}
        note("load", **facts, device=str(others[0]) if others else None, where=where())


def is_path(f: Any) -> bool:
    return isinstance(f, (str, os.PathLike))


def dicts(obj: Any, depth: int = 4) -> Iterator[dict]:
    """The dicts in an object that is saved, itself included."""
    if isinstance(obj, dict):
        yield obj
    inner = [*obj.values()] if isinstance(obj, dict) else obj if isinstance(obj, list) else []
    for value in inner if depth else ():
        yield from dicts(value, depth - 1)
