"""Two runs on one machine do not collide, and nothing of theirs listens beyond loopback.

On a node whose own name is a network address, see hosts.py: there gloo would listen on that.
"""

from pathlib import Path

import pytest
from helpers.hosts import Hosts, require, requirements
from helpers.jobs import Job, command


@pytest.mark.parametrize("script", ["ddp_spawn.py", "ddp_torchrun.py"])
def test_two_runs_at_once_listen_on_loopback_only(tmp_path, fashion, script):
    require(requirements())
    words = command(script, 50, *fashion(1000, 10), "--log-interval", 1)
    with Hosts(1) as hosts:
        jobs = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            jobs.append(Job(words, tmp_path / name, {}, fork=True, host=hosts.name(0)))
        for job in jobs:
            job.wait_for("Step 3 ")
        assert all(job.process.poll() is None for job in jobs)
        listening = []
        for name, loopback in (("tcp", "0100007F"), ("tcp6", "0" * 24 + "01000000")):
            table = Path(f"/proc/{jobs[0].process.pid}/net/{name}").read_text()
            for line in table.splitlines()[1:]:
                _, address, _, state, *_ = line.split()
                if state == "0A":
                    listening.append(address.split(":")[0] == loopback)
        assert len(listening) >= 2 and all(listening)
        for job in jobs:
            job.kill()
