"""How the ranks of two-process jobs end, a thousand times: with status 0, aborted or hanging.

    python benchmarks/ends.py ddp_spawn.py 1000         or ddp_torchrun.py, multinode.py; under load
    python benchmarks/ends.py docs/your_loop.py 1000    or another program for torchrun

A rank is forked from a process that has imported everything, so that it costs half a second. It
trains a few steps by the program's own code, and then ends as every Python program does.
"""

import collections
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch._dynamo  # what making an optimizer would import

import common.data
import ddp_torchrun  # noqa: F401, and with it what the other programs import


def train(rank: int, port: int) -> None:
    """As the program's launcher starts a rank. One that hangs is ended by SIGALRM, status -14."""
    signal.alarm(60)
    if late:
        torch.optim.Optimizer.add_param_group = add_param_group
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    if program.name != "ddp_spawn.py":
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    spawned = "mp.spawn(" in source  # its main guard starts processes, of which this is one
    module = types.ModuleType(program.stem if spawned else "__main__")
    sys.modules["program"] = module  # where it stays to the end
    exec(compile(source, program, "exec"), vars(module))
    if spawned:
        args = module.parse_args()
        args.init_method, args.nproc_per_node = f"file://{os.getcwd()}/store", 2
        module.main(rank, args)


def add_param_group(optimizer: torch.optim.Optimizer, *args: object) -> None:
    import torch.distributed.nn  # noqa: F401

    original(optimizer, *args)


program, count = Path(sys.argv[1]).resolve(), int(sys.argv[2])
source = program.read_text()
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a forked process can use no GPU
sys.argv[1:] = ["1", "--model", "mlp", "--batch-size", "10", "--device", "cpu"]
data = common.data.make_digits(40, 0), common.data.make_digits(10, 1)
common.data.load_dataset = lambda *_: data
# torch imports this, too, when an optimizer is made, and its functions keep the process group that
# is there by then. So each rank imports it anew, at that moment or where the program does.
late = sys.modules.pop("torch.distributed.nn", None)
sys.modules.pop("torch.distributed.nn.functional", None)
original = torch.optim.Optimizer.add_param_group
torch.set_num_threads(1)
gc.freeze()  # or a garbage collection in a rank copies all that torch is made of
ended = collections.Counter()
for job in range(count):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    pids = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            os.dup2(os.open(f"output{rank}", os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            train(rank, port)
            sys.exit()  # through everything that Python does at its end
        pids.append(pid)
    for rank, pid in enumerate(pids):
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ended[status] += 1
        if status:
            said = Path(f"output{rank}").read_text()
            print(f"{program.name}, rank {rank}, status {status}:\n{said}", file=sys.stderr)
    shutil.rmtree(folder)
    if (job + 1) % 100 == 0 or job + 1 == count:
        print(f"torch {torch.__version__}, {program.name}: {dict(ended)}", flush=True)
gc.unfreeze()  # triton would name all that is left
