"""The ranks of a job by torch's mp.start_processes, from a process that has imported torch.

That saves three seconds of processor time a rank. What a user types is started by jobs.py.
"""

import functools
import importlib
import multiprocessing.forkserver
import os
import runpy
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import ROOT

PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torchvision"]


@functools.cache
def start_server() -> None:
    """The process that ranks are forked from. A loader's would lack torch, and hear no signals."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()


def train(folder: Path, script: Path, processes: int, *arguments: object, dtype: str = "") -> str:
    """What the ranks print that train with this script in this folder, rank 0's first."""
    held = socket.socket()  # so that nobody else gets its port; torch may listen on it
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("localhost", 0))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(held.getsockname()[1])}
    env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    start_server()
    given = (folder, str(ROOT / script), [*map(str, arguments)], dtype, env)
    with held:
        mp.start_processes(one_rank, given, processes, start_method="forkserver")
    return "".join((folder / f"output-{rank}").read_text() for rank in range(processes))


def one_rank(rank: int, folder: Path, script: str, words: list, dtype: str, env: dict) -> None:
    """In a process of its own: the whole program, but of ddp_spawn.py what mp.spawn would call."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    output = os.open(f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_default_dtype(getattr(torch, dtype or "float32"))
    torch.set_num_threads(1)
    if torch.__version__ < "2.8":  # pytorch#154976: it may hang while gloo tidies up
        end = dist.destroy_process_group
        dist.destroy_process_group = lambda *group: (time.sleep(0.2), end(*group))
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    if Path(script).stem != "ddp_spawn":
        runpy.run_path(script, run_name="__main__")
        return
    module = importlib.import_module("ddp_spawn")
    args = module.parse_args()
    args.nproc_per_node, args.init_method = int(env["WORLD_SIZE"]), "env://"
    module.main(rank, args)
