"""docs/multinode.md's lines for mpirun, with Open MPI on two nodes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.files import difference, idx_files, load
from helpers.hosts import Hosts, require, requirements
from helpers.jobs import ROOT, SITE, epochs
from helpers.ranks import train

pytestmark = pytest.mark.slow("nodes in network namespaces")

# In place of ssh: as there, nothing of the first node's environment comes along.
AGENT = """#!/bin/sh
host=$1; shift
exec env -i PATH=/usr/bin:/bin:/usr/sbin HOME={folder} OMP_NUM_THREADS=1 \\
    PYTHONPATH={site} LADDER_CPU=1 LADDER_DTYPE=float64 ip netns exec $host unshare --uts \\
    sh -c 'hostname "$0" && cd {folder} && exec sh -c "$*"' $host "$@"
"""


def test_mpirun_starts_torchrun_on_each_node_or_the_ranks_themselves(tmp_path):
    missing = [name for name in ("mpirun", "orted") if not shutil.which(name)]
    require(f"not installed: {', '.join(missing)}" if missing else requirements())
    page = (ROOT / "docs" / "multinode.md").read_text()
    block = re.search(r"\n## mpirun.*?```bash\n(.*?)```", page, re.S)[1]
    options = [1, "--batch-size", 8, "--dataset", "fashion-mnist", "--data-dir"]
    options.append(idx_files(tmp_path / "data", 96, 10))
    train(tmp_path, "single_gpu.py", 1, *options[:2], 16, *options[3:], dtype="float64")
    expected = load(tmp_path / "checkpoint.pt")
    given = " ".join(map(str, options))
    assert block.count("50 10'") == block.count("mpirun -np ") == 2
    block = block.replace("50 10'", f"{given}'").replace("=gpu", "=1")
    block = block.replace("-np 8 --map-by ppr:4:node", "-np 2 --map-by ppr:1:node")
    for script in ("ddp_torchrun.py", "multinode.py"):
        block = block.replace(f" {script} ", f" {ROOT / script} --snapshot-path {script}.pt ")
    with Hosts(2) as hosts:
        (tmp_path / "agent").write_text(AGENT.format(site=SITE, folder=tmp_path))
        (tmp_path / "agent").chmod(0o755)
        (tmp_path / "nodes").write_text("".join(f"{hosts.name(host)}\n" for host in (0, 1)))
        env = {"OMPI_MCA_plm_rsh_agent": tmp_path / "agent", "OMPI_MCA_oob_tcp_if_include": "eth0"}
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
        env |= {"OMPI_MCA_orte_default_hostfile": tmp_path / "nodes"}  # as PBS tells it
        env |= {"PBS_NODEFILE": tmp_path / "nodes", "PYTHONPATH": SITE, "LADDER_DTYPE": "float64"}
        env |= {"OMP_NUM_THREADS": 1}
        env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = hosts.command(0, ["bash", "-ec", block], env)
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        result = subprocess.run(command, cwd=tmp_path, timeout=240, **both)
    assert result.returncode == 0, result.stdout
    assert len(epochs(result.stdout)) == 2, result.stdout
    for script in ("ddp_torchrun.py", "multinode.py"):
        assert difference(load(tmp_path / f"{script}.pt"), expected) < 1e-12, script
    for rank in (0, 1):
        assert result.stdout.count(f"[rank {rank} of 2] cpu") == 2, result.stdout
