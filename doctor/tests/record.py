"""Run programs, and keep what their ranks have noted: the fixtures of test_checks.py.

python tests/record.py [--to FOLDER] [NAME ...]      writes tests/fixtures/NAME.tar.xz
"""

import argparse
import os
import runpy
import socket
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
WORLD = 2


def rank_of(number: int, program: Path, env: dict[str, str]) -> int:
    """Start a rank as a fork of this process, which saves most of the time."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.environ.update(env, RANK=str(number), LOCAL_RANK=str(number))
        output = os.open(program.with_suffix(f".{number}"), os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = [str(program)]
        runpy.run_path(str(program), run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        from ddp_doctor.watch.note import close

        close()
        os._exit(status)


def run(name: str, text: str, folder: Path, seconds: float = 120) -> int:
    """Run a program on two ranks, whose notes go into the folder."""
    import torch
    import torch._dynamo

    os.environ["DDP_DOCTOR_FOLDER"] = str(folder)
    import ddp_doctor.watch  # noqa: F401

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work, socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("localhost", 0))
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(held.getsockname()[1])}
        env |= {"WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        program = Path(work, f"{name}.py")
        program.write_text(text)
        ranks, status = {rank_of(number, program, env) for number in range(WORLD)}, 0
        end = time.monotonic() + seconds
        while ranks:
            for pid in [*ranks]:
                done, code = os.waitpid(pid, os.WNOHANG)
                if done:
                    ranks.discard(pid)
                    status = status or os.waitstatus_to_exitcode(code)
            if time.monotonic() > end:
                for pid in ranks:
                    os.kill(pid, 9)
            time.sleep(0.02)
        if status:
            print(*(path.read_text() for path in Path(work).glob("*.[01]")), sep="\n")
        return status


def main() -> None:
    from programs import PROGRAMS

    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path, default=HERE / "fixtures")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    args.to.mkdir(exist_ok=True)
    for name in args.names or PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            status = run(name, PROGRAMS[name][0], Path(folder))
            kept = [*Path(folder).glob("*.jsonl"), *Path(folder).glob("*.numbers")]
            kept += [*Path(folder).glob("*.own"), *Path(folder).glob("*.worker")]
            with tarfile.open(args.to / f"{name}.tar.xz", "w:xz") as file:
                for path in sorted(kept):
                    file.add(path, path.name, filter=anonymous)
        print(name, status, flush=True)


def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    main()
