"""Several hosts on one machine: needs Linux, root and iproute2.

A host is a network namespace with an address, a hostname and an /etc/hosts of its own; a bridge
joins them, and nothing else is reachable. Files, processes, CPUs and the clock are shared.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

NETNS = Path("/etc/netns")  # `ip netns exec NAME` mounts the files in NAME/ over those in /etc
numbers = itertools.count(1)


def requirements() -> str | None:
    """Why there can be no hosts here, or None."""
    for name in ("ip", "unshare", "hostname"):
        if not shutil.which(name):
            return f"network namespaces need Linux and {name}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True)
    if tried.returncode:
        return "network namespaces need root, and in a container docker run --privileged"
    return None


def require(reason: str | None) -> None:
    """Skip the test for this reason; in CI, where everything must be there, let it fail."""
    if reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def run(*argv: object) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


class Hosts(contextlib.AbstractContextManager):
    """`count` hosts on one bridge, which no other group reaches: 10.77.0.1, and so on."""

    def __init__(self, count: int = 2) -> None:
        self.count, self.group = count, f"ladder{os.getpid()}-{next(numbers)}"
        bridge = self.name(-1)
        run("ip", "netns", "add", bridge)
        run("ip", "-n", bridge, "link", "add", "br0", "up", "type", "bridge")
        for host in range(count):
            name, peer = self.name(host), ("peer", "name", f"port{host}", "netns", bridge)
            run("ip", "netns", "add", name)
            run("ip", "link", "add", "eth0", "netns", name, "type", "veth", *peer)
            run("ip", "-n", bridge, "link", "set", f"port{host}", "up", "master", "br0")
            run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            lines += [f"{self.address(other)} {self.name(other)}" for other in range(count)]
            (NETNS / name).mkdir(parents=True)
            (NETNS / name / "hosts").write_text("\n".join(lines) + "\n")

    def name(self, host: int) -> str:
        """The host's name, which is its namespace's too. That of the bridge ends with n0."""
        return f"{self.group}n{host + 1}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(
        self, host: int, argv: Iterable[object], env: Mapping[str, object] | None = None
    ) -> list[str]:
        """What runs `argv` on the host. All are exec'd, so the process started is `argv` itself.

        `env` comes on top of the caller's environment; an empty variable is one that is not set.
        """
        values = {name: str(value) for name, value in (env or {}).items()}
        unset = [f"--unset={name}" for name, value in values.items() if not value]
        settings = [f"{name}={value}" for name, value in values.items() if value]
        enter = ["ip", "netns", "exec", self.name(host), "unshare", "--uts"]
        rename = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name(host)]
        return [*enter, *rename, "env", *unset, *settings, *map(str, argv)]

    def __exit__(self, *error: object) -> None:
        """Kill what still runs on the hosts, and remove them."""
        for name in map(self.name, range(-1, self.count)):
            while pids := run("ip", "netns", "pids", name).split():
                subprocess.run(["kill", "-KILL", *pids], stderr=subprocess.DEVNULL)
            run("ip", "netns", "del", name)
            shutil.rmtree(NETNS / name, ignore_errors=True)
