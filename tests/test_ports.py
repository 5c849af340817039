"""Two runs on one machine do not collide, and nothing of theirs listens beyond loopback."""

import os
import re
from pathlib import Path

import pytest


@pytest.mark.parametrize("script", ["ddp_spawn.py", "ddp_torchrun.py"])
def test_two_runs_at_once_listen_on_loopback_only(start, tmp_path, fashion, script):
    options, jobs, ours = (50, *fashion(1000, 10), "--log-interval", 1), [], set()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        jobs.append(start(script, *options, folder=tmp_path / name, fork=True))
    for job in jobs:
        job.wait_for("Step 3 ")
        for pid in job.pids():
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                    ours.add(found[1])
    assert all(job.process.poll() is None for job in jobs)
    listening = []
    for name, loopback in (("tcp", "0100007F"), ("tcp6", "0" * 24 + "01000000")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, address, _, state, *_, socket = line.split()[:10]
            if state == "0A" and socket in ours:
                listening.append(address.split(":")[0] == loopback)
    assert len(listening) >= 2 and all(listening)
