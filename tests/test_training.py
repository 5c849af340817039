"""A script runs as it is copied, prints the tutorials' lines, and learns."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers.hosts import require
from helpers.jobs import EPOCH, ROOT, SCRIPTS, Job, epochs, every_script

README = (ROOT / "README.md").read_text()


@every_script
def test_a_copy_of_a_script_and_common_learns_and_prints(tmp_path, fashion, script):
    """By README's command, from another folder; what it prints on stderr would show, too."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(ROOT / "common", project / "common")
    shutil.copy(ROOT / script, project)
    (command,) = re.findall(rf"`([^`]*\b{script} 50 10.*)` \|$", README, re.M)
    command = command.replace("=gpu", "=2")  # as README says for a CPU
    # multinode.py's is that of the first machine of two.
    command = command.replace("--world-size 4", "--world-size 2")
    command = command.replace("tcp://10.0.0.1:22225", f"file://{tmp_path}/store")
    options = " ".join(["2 1", *fashion(300, 50), "--batch-size 8"])
    command = command.replace(f"{script} 50 10", f"{project}/{script} {options}")
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    text = Job(["bash", "-c", command], elsewhere, env).finish()
    processes = 2 if script in SCRIPTS[2:] else 1
    steps = 38 if processes == 1 else 19
    each = [f"[GPU{rank}] Epoch {{}} | Batchsize: 8 | Steps: {steps}" for rank in range(processes)]
    each.append("Epoch {} | Training checkpoint saved at checkpoint.pt")
    expected = ["total_epochs: 2, save_every: 1, batch_size: 8"]
    if script in SCRIPTS[:2]:
        expected[0] += ", on cpu, from epoch 0"
    else:
        expected += [f"[rank {r} of {processes}] on cpu, from epoch 0" for r in range(processes)]
    expected += [line.format(epoch) for epoch in (0, 1) for line in each]
    # torch's store warns on a host that cannot look up its own address.
    rest = EPOCH.sub("", re.sub(r"^.*socket\.cpp.*$", "", text, flags=re.M))
    for line in expected:  # torchrun starts python -u, which writes a line and its end apart, and
        assert line in rest, text  # another rank's line may come between them
        rest = rest.replace(line, "", 1)
    assert not rest.strip(), text
    one, two = epochs(text)
    assert one["train_loss"] > two["train_loss"] > 0 and two["val_loss"] < one["val_loss"]
    assert two["accuracy"] == two["correct"] * 2 > 50 and two["total"] == 50 and two["rate"] > 0
    left = [path.name for path in elsewhere.iterdir() if not path.name.startswith("output-")]
    assert left == ["checkpoint.pt"]


@pytest.mark.slow("60,000 images")
def test_mnist_passes_97_percent_in_an_epoch(run, tmp_path):
    """The official gz files, which torchvision verifies and unpacks."""
    source = Path(os.environ.get("MNIST_DIR", ROOT.parent / "shared" / "data")) / "MNIST" / "raw"
    require(None if source.is_dir() else "MNIST_DIR is no folder with MNIST/raw and the gz files")
    shutil.copytree(source, tmp_path / "data" / "MNIST" / "raw")
    (line,) = epochs(run("ddp_spawn.py", 1, "--dataset", "mnist"))
    assert line["total"] == 10_000 and line["accuracy"] > 97, line
