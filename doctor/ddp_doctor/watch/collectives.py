"""Process groups, the calls of torch.distributed, and whatever lets ranks differ on purpose."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_doctor.watch import content
from ddp_doctor.watch.hooks import Raised, around, careful, where
from ddp_doctor.watch.models import M
from ddp_doctor.watch.note import begin, close, note
from ddp_doctor.watch.optimizers import OPT, STEPPING, named

CALLS = "all_reduce reduce broadcast all_gather all_gather_object all_gather_into_tensor barrier "
CALLS += "gather gather_object broadcast_object_list reduce_scatter_tensor scatter all_to_all"
CALLS += " all_to_all_single reduce_scatter all_reduce_coalesced send recv"
BATCH = "batch_isend_irecv"  # whose P2POps compare isend with torch's own, so that is not watched
VALUES, LIMIT = 500, 20_000  # calls whose values are noted, and calls that are noted at all
LIBRARIES = "torch.distributed.pipelining", "megatron.core"


class Calls:
    """The calls so far, and what was said of the topology."""

    def __init__(self) -> None:
        self.count = self.depth = 0
        self.told: set[str] = set()


C = Calls()


def group_made(*args, **kwargs):
    result = yield
    if not isinstance(result, Raised):
        begin(dist.get_rank(), dist.get_world_size())


def group_ended(*args, **kwargs):
    close()
    yield


def subgroup_made(*args, **kwargs):
    group = yield
    size = group.size() if isinstance(group, dist.ProcessGroup) else 1
    if 1 < size < dist.get_world_size():
        told("groups", "new_group()")


def called(name: str) -> Any:
    def call(*args, **kwargs):
        C.count, C.depth = C.count + 1, C.depth + 1  # one call may make others
        if C.depth == 1 and C.count < LIMIT:
            batch = (*args, [])[0] if name == BATCH else []
            parts = [*args, *(getattr(op, "tensor", None) for op in batch)]
            noted(name, next((a for a in parts if torch.is_tensor(a)), kwargs.get("tensor")))
        yield
        C.depth -= 1

    return call


@careful
def noted(name: str, tensor: torch.Tensor | None) -> None:
    facts: dict[str, Any] = {"shape": None, "value": None, "weights": False}
    if tensor is not None:
        facts["shape"] = [*tensor.shape]
        if C.count < VALUES and tensor.numel() == 1 and name != "recv":
            facts["value"] = float(tensor)
        elif C.count < VALUES:
            weights = (p for o in OPT.made for g in o.param_groups for p in g["params"])
            facts["weights"] = any(p.data_ptr() == tensor.data_ptr() for p in weights)
    backwards = M.backwards - OPT.backwards
    note("collective", name=name, backwards=backwards, **facts, where=where())


for module in (dist, dist.distributed_c10d):
    around(module, "init_process_group")(group_made)
    around(module, "destroy_process_group")(group_ended)
    around(module, "new_group")(subgroup_made)
    for name in (*CALLS.split(), BATCH):
        around(module, name)(called(name))


# --- what lets ranks differ on purpose
def told(what: str, name: str) -> None:
    if f"{what} {name}" not in C.told:
        C.told.add(f"{what} {name}")
        note("topology", what=what, name=name, where=where())


@around(device_mesh.DeviceMesh, "__init__")
def mesh_made(self, *args, **kwargs):
    yield
    if self.ndim > 1 or self.size() < dist.get_world_size():
        told("groups", "a mesh of devices")


@around(Join, "__enter__")
def joined(self):
    told("join", "Join")
    yield


@around(DDP, "register_comm_hook", "_register_builtin_comm_hook", "_register_fused_optim")
def hooked(self, *args, **kwargs):
    told("hook", "a communication hook")
    yield


@around(torch, "compile")
@around(nn.Module, "compile")
def compiled(model=None, *args, **kwargs):
    if isinstance(model, DDP):
        told("compiled", "torch.compile(ddp_model)")
    yield


@careful
def looked(optimizer: Any) -> None:
    """What the first steps show."""
    if OPT.steps > 2:
        return
    for name in LIBRARIES:
        if name in sys.modules:
            told("groups", name)
    kind = type(optimizer)
    if "Zero" in kind.__name__ or kind.__module__.startswith("deepspeed"):
        told("sharded", kind.__name__)
    if "LocalSGD" in kind.__name__:
        told("averaged", kind.__name__)
    parameters = [*named(optimizer).values()]
    if any(hasattr(p, "_fsdp_flattened") for p in parameters):
        told("sharded", "FullyShardedDataParallel")
    if not all(map(content.plain, parameters)):
        told("sharded", "fully_shard or a tensor's placement")
        placements = [str(getattr(p, "placements", "")) for p in parameters]
        if any(text != "(Shard(dim=0),)" for text in placements):  # fully_shard has these alone
            told("groups", "tensor parallelism")


STEPPING.append((looked, lambda optimizer: None))
