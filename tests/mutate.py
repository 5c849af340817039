"""Does the suite notice? Break the scripts in the ways that matter: a test must fail each time.

    python tests/mutate.py                          all, a quarter of an hour on two cores
    python tests/mutate.py multinode.py             what breaks this file
    python tests/mutate.py "no set_epoch" padded    mutants whose names contain these words
    python tests/mutate.py --list

Not in CI; tests/test_mutate.py, which is in the suite, keeps the list from going stale. Each
run breaks a copy of the working tree in one place, and runs the test that must notice: killed. A
mutant that survives means a test to write. First the same tests are run on unbroken copies. Needs
what the suite needs in CI: root for several hosts, and Slurm.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300  # for a test, at most
# A fork from a process that has imported torch: a second instead of five for most of the tests.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["pytest", "torch", "torch._dynamo", "torchvision"])


def runs(words: list[str]) -> Iterator[tuple[Mutant, str]]:
    """Each mutant with each of its files, where one of the words is the file or in the name."""
    for mutant in MUTANTS:
        for file in mutant.tests:
            if not words or file in words or any(word in mutant.name for word in words):
                yield mutant, file


def mutated(mutant: Mutant, code: str) -> str:
    assert code.count(mutant.old) == 1, f"{mutant.name}: {code.count(mutant.old)} times"
    return code.replace(mutant.old, mutant.new)


def copy(folder: Path) -> Path:
    """The working tree, without what git ignores."""
    ask = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(ask, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def pytest_main(folder: Path, test: str) -> None:
    """Run the test there, in a process of its own, whose status is pytest's."""
    os.chdir(folder)
    with open("output", "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    quick = ("-x", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--basetemp=files")
    status = int(pytest.main([*quick, f"tests/{test}"]))
    sys.stdout.flush()
    os._exit(status)  # not sys.exit: gloo's threads may abort while Python ends


def run_test(folder: Path, test: str) -> tuple[int, str, float]:
    """pytest's status, what failed or was said last, and the seconds that it took."""
    start = time.monotonic()
    process = FORKSERVER.Process(target=pytest_main, args=(folder, test))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        os.kill(process.pid, signal.SIGINT)  # pytest then ends what the test has started
        process.join(30)
        process.kill()
        process.join()
    text = (folder / "output").read_text()
    failed = re.findall(r"^(?:FAILED|ERROR) tests/(.*)", text, re.M)
    last = (failed or text.splitlines() or [""])[-1]
    return process.exitcode, last, time.monotonic() - start


def run_baseline(test: str) -> tuple[str, str, float]:
    """The test in an unbroken copy: passes, or ERROR."""
    with tempfile.TemporaryDirectory() as folder:
        status, last, seconds = run_test(copy(Path(folder)), test)
    return "ERROR" if status else "passes", last, seconds


def run_mutant(mutant: Mutant, file: str) -> tuple[str, str, float]:
    """Its test in a copy with the file broken: killed, SURVIVED or ERROR."""
    with tempfile.TemporaryDirectory() as folder:
        path = copy(Path(folder)) / file
        path.write_text(mutated(mutant, path.read_text()))
        status, last, seconds = run_test(Path(folder), mutant.tests[file])
    return {0: "SURVIVED", 1: "killed"}.get(status, "ERROR"), last, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="files to break, or words of mutants' names")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--no-baseline", action="store_true", help="only the broken copies")
    args = parser.parse_args()
    chosen = list(runs(args.words))
    if not chosen:
        parser.error(f"nothing is called {' or '.join(args.words)}: see --list")
    if args.list:
        for mutant, file in chosen:
            print(f"{file}: {mutant.name} ({mutant.breaks})\n    {mutant.tests[file]}")
        return
    os.environ["CI"] = "true"  # a test that cannot run here fails, and is not skipped
    tests = [] if args.no_baseline else sorted({mutant.tests[file] for mutant, file in chosen})
    start, found = time.monotonic(), []
    with ThreadPoolExecutor(args.jobs) as pool:
        work = [(test, pool.submit(run_baseline, test)) for test in tests]
        for mutant, file in chosen:
            work.append((f"{file}: {mutant.name}", pool.submit(run_mutant, mutant, file)))
        for name, future in work:
            result, last, seconds = future.result()
            found.append(result)
            print(f"{result:8} {seconds:5.0f} s  {name}", flush=True)
            if result != "passes":
                print(f"{'':18}{last}", flush=True)
    counts = ", ".join(f"{found.count(result)} {result}" for result in dict.fromkeys(found))
    print(f"{counts} in {(time.monotonic() - start) / 60:.0f} minutes")
    sys.exit("SURVIVED" in found or "ERROR" in found)


if __name__ == "__main__":
    main()
