"""Run programs, and keep what their ranks have noted: the fixtures of test_checks.py.

python tests/record.py [--to FOLDER] [NAME ...]      writes tests/fixtures/NAME.tar.xz

A NAME is one of programs.txt, or a file. Each program is also run without the doctor: its ranks
must end with the same status, print the same and write the same files.
"""

import argparse
import hashlib
import os
import random
import runpy
import socket
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
WORLD = 2


class Ended(NamedTuple):
    statuses: list[int]
    printed: list[str]  # by each rank
    files: dict[str, str]  # that they have written, and their digests
    errors: list[str]


def rank_of(number: int, program: Path, folder: Path, env: dict[str, str]) -> int:
    """Start a rank as a fork of this process, which saves most of the time."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.environ.update(env, RANK=str(number), LOCAL_RANK=str(number))
        for stream, name in enumerate(("out", "err"), start=1):
            path = program.with_name(f"{name}{number}")
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
        os.chdir(folder)
        if "DDP_DOCTOR_FOLDER" in env:
            import ddp_doctor.watch  # noqa: F401
        random.seed(number)  # so that both runs draw the same
        np.random.seed(number)
        sys.argv = [str(program)]
        runpy.run_path(str(program), run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        if "DDP_DOCTOR_FOLDER" in env:
            from ddp_doctor.watch.note import close

            close()
        os._exit(status)


def run(name: str, text: str, folder: Path | None, seconds: float = 120) -> Ended:
    """Run a program on two ranks, whose notes go into the folder. Without one, nobody watches."""
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work, socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("localhost", 0))
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(held.getsockname()[1])}
        env |= {"WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"DDP_DOCTOR_FOLDER": str(folder)} if folder else {}
        program, own = Path(work, f"{name}.py"), Path(work, "files")
        program.write_text(text)
        own.mkdir()
        ranks = {rank_of(number, program, own, env): number for number in range(WORLD)}
        statuses, end = [0] * WORLD, time.monotonic() + seconds
        while ranks:
            for pid in [*ranks]:
                done, code = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[ranks.pop(pid)] = os.waitstatus_to_exitcode(code)
            if time.monotonic() > end:
                for pid in ranks:
                    os.kill(pid, 9)
            time.sleep(0.02)
        out, err = (
            [Path(work, f"{n}{r}").read_text() for r in range(WORLD)] for n in ("out", "err")
        )
        paths = [path for path in own.rglob("*") if path.is_file()]
        files = {str(p.relative_to(own)): hashlib.md5(p.read_bytes()).hexdigest() for p in paths}
        return Ended(statuses, out, files, err)


def main() -> None:
    from programs import PROGRAMS

    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path, default=HERE / "fixtures")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    args.to.mkdir(exist_ok=True)
    differ = []
    for name in args.names or PROGRAMS:
        text = PROGRAMS[name][0] if name in PROGRAMS else Path(name).read_text()
        name = Path(name).stem
        with tempfile.TemporaryDirectory() as folder:
            watched = run(name, text, Path(folder))
            kept = [*Path(folder).glob("*.jsonl"), *Path(folder).glob("*.numbers")]
            kept += [*Path(folder).glob("*.own"), *Path(folder).glob("*.worker")]
            with tarfile.open(args.to / f"{name}.tar.xz", "w:xz") as file:
                for path in sorted(kept):
                    file.add(path, path.name, filter=anonymous)
        plain = run(name, text, None)
        print(name, watched.statuses, flush=True)
        if plain[:3] != watched[:3]:
            print(f"WITHOUT THE DOCTOR: {plain}\nWITH IT: {watched}")
            differ.append(name)
        elif any(plain.statuses):
            print(*watched.errors)
    sys.exit(f"other than without the doctor: {' '.join(differ)}" if differ else 0)


def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    main()
