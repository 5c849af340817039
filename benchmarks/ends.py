"""How the ranks of two-process jobs end, a thousand times: with status 0, aborted or hanging.

    python benchmarks/ends.py ddp_spawn.py 1000     or ddp_torchrun.py; under load

A rank is forked from a process that has imported everything, so that it costs half a second. It
trains two steps by the script's own main(), and then ends as every Python program does.
"""

import collections
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch._dynamo  # what the first step would import
import torch.multiprocessing as mp

from common.data import make_digits


def train(rank: int, port: int) -> None:
    """As the script's launcher starts a rank. One that hangs is ended by SIGALRM, status -14."""
    signal.alarm(60)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")
    args = module.parse_args()
    if script == "ddp_torchrun.py":
        module.main(args)
    else:
        args.store, args.nproc_per_node = f"store{port}", 2
        module.main(rank, args)


script, count = sys.argv[1], int(sys.argv[2])
sys.argv[1:] = ["1", "--model", "mlp", "--batch-size", "10", "--device", "cpu"]
folder = tempfile.mkdtemp()
os.chdir(folder)
module = importlib.import_module(script.removesuffix(".py"))
data = make_digits(40, 0), make_digits(10, 1)
module.load_dataset = lambda *_: data
mp.parent_process = lambda: SimpleNamespace(is_alive=lambda: True)
torch.set_num_threads(1)
gc.freeze()  # or a garbage collection in a rank copies all that torch is made of
ended = collections.Counter()
for job in range(count):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pids = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            train(rank, port)
            sys.exit()  # through everything that Python does at its end
        pids.append(pid)
    ended.update(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    if (job + 1) % 100 == 0 or job + 1 == count:
        print(f"torch {torch.__version__}, {script}: {dict(ended)}", flush=True)
shutil.rmtree(folder)
