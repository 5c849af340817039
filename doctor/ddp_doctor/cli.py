"""What is silently wrong with a program that trains on several processes, and where its time goes.

    ddp-doctor torchrun --nproc_per_node=2 train.py --my-options
    ddp-doctor python ddp_spawn.py
    ddp-doctor accelerate launch --num_processes 2 train.py
    ddp-doctor explain same-order    what a finding means
    ddp-doctor restore FOLDER        puts files back, if a doctor was killed before it could

Put it before your own command. The doctor's options stand before the command, too.
"""

import argparse
import json
import sys
from pathlib import Path

from ddp_doctor.restore import Undo, is_free, leftovers
from ddp_doctor.run import Error, Run, program
from ddp_doctor.vault import Refused

EXPLAIN = Path(__file__).parent / "explain"


def main(given: list[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else given
    if given[:1] == ["explain"] and len(given) < 3:
        return explain(*given[1:])
    if given[:1] == ["restore"] and len(given) == 2:
        return restore(Path(given[1]))
    parser = argparse.ArgumentParser(
        "ddp-doctor",
        "%(prog)s [options] COMMAND ...",
        __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=0, help="end the job after so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    parser.add_argument("--folder", type=Path, help="on several machines, one that all can see")
    parser.add_argument("--patience", type=float, default=60, help="seconds without any act")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(given)
    if not args.command:
        parser.error("name the command that trains")
    for home in leftovers(Path.cwd()):
        say(f"an earlier run was killed before it put files back: ddp-doctor restore {home}")
    try:
        run = Run(program(args.command), args.minutes, args.patience, args.folder)
    except (Error, OSError) as error:
        return failed(str(error))
    try:
        return diagnose(run, args.json)
    finally:
        run.close()


def diagnose(run: Run, file: Path | None) -> int:
    try:
        run.run()
    except (Refused, OSError) as error:
        run.reason = f"the program is not started: {error}"
    finally:
        run.restore()
    for line in run.lines:
        say(line)
    if reason := run.reason or run.refused():
        return failed(reason)
    if run.waits():
        return failed("the machine with rank 0 judges all of them")
    # Only now, because they need not be there for a restore.
    from ddp_doctor.checks import blind, judge, speed
    from ddp_doctor.job import Found, Job

    job = Job(run.shared or run.folder, 0 if run.stopped else run.status)
    crash = next((e for e in job.all("crash") if e["doctor"]), None)
    if own := run.failures() or ([f"{crash['doctor'][0]}(): {crash['error']}"] if crash else []):
        return failed(f"the doctor failed: {own[0]}")
    found = judge(job)
    if run.stopped:
        what, remedy = f"the job was ended {run.stopped}", "what comes later was not seen"
        found.append(Found("limits", "the program", what, remedy, "NOTE"))
    count = sum(one.label == "FOUND" for one in found)
    time = speed(job)
    lines = [*map(str, found), *filter(None, [time]), f"{count} found"]
    if (why := blind(job)) and not count:
        return failed(f"{why}{f' (status {run.status})' if run.status else ''}", *lines[:-1])
    print("", *lines, sep="\n", flush=True)  # the program may have left a progress bar
    if file:
        listed = {"found": [one._asdict() for one in found], "time": time, "files": run.lines}
        file.write_text(json.dumps(listed, indent=1) + "\n")
    return 1 if count else 0


def failed(why: str, *lines: str) -> int:
    print("", *lines, sep="\n", end="", flush=True)
    say(f"error: {why}")
    return 2


def say(line: str) -> None:
    print(f"ddp-doctor: {line}", file=sys.stderr, flush=True)


def explain(kind: str = "") -> int:
    page = EXPLAIN / f"{kind}.md"
    if not page.is_file():
        print("ddp-doctor explain KIND, where KIND is one of", end=" ")
        print(*sorted(page.stem for page in EXPLAIN.glob("*.md")), sep=", ")
        return 2 if kind else 0
    print(page.read_text(encoding="utf-8").rstrip())
    return 0


def restore(folder: Path) -> int:
    homes = [folder] if (folder / "journal.jsonl").is_file() else leftovers(folder)
    if not homes:
        return failed(f"no run has left anything to put back in or above {folder}")
    status = 0
    for home in homes:
        if not is_free(home):
            return failed(f"the run of {home} still lives")
        undo = Undo(home)
        undo.run()
        for line in [*undo.said, *undo.failed]:
            say(line)
        say(f"{home}: {'not all is' if undo.failed else 'all is'} as it was before")
        status = 2 if undo.failed else status
    return status


if __name__ == "__main__":
    sys.exit(main())
