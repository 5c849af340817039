"""What a user gets wrong is one line of ours, once, and a status that is not 0. Nothing is lost.

More of them are in test_options.py, test_snapshots.py and test_devices.py.
"""

import errno
import re
import sys
import urllib.request
from email.message import Message
from pathlib import Path
from unittest.mock import Mock
from urllib.error import HTTPError, URLError

import pytest
import torch
import torch.distributed as dist
from helpers.files import idx_files
from helpers.jobs import SCRIPTS, TORCHRUN

from common.data import DATASETS, DataError, load_dataset
from common.model import build_model

DDP, ELASTIC, NODES = SCRIPTS[2:], SCRIPTS[3:4], SCRIPTS[4:]
FILE = "--world-size 2 --rank 1 --init-method file://"
ALONE = ("single_gpu.py", "data_parallel.py", "ddp_spawn.py")
# Scripts, what is typed (variables of the environment first, as in a shell), how the line begins.
MISTAKES = [
    (SCRIPTS, "five", "argument total_epochs: invalid positive value: 'five'"),
    (SCRIPTS, "--batch_size 1.5", "argument --batch-size/--batch_size: invalid positive value"),
    (SCRIPTS, "--lr much", "argument --lr: invalid float value: 'much'"),
    (SCRIPTS, "--bach-size 8", "unrecognized arguments: --bach-size"),
    (SCRIPTS, "--dataset imagenet", "argument --dataset: invalid choice: 'imagenet'"),
    (SCRIPTS, "--model gpt", "argument --model: invalid choice: 'gpt'"),
    (SCRIPTS[:1] + DDP, "--device cuda", "argument --device: invalid choice: 'cuda'"),  # not here
    (SCRIPTS[:4], "--snapshot-path /no/x.pt", "--snapshot-path /no/x.pt: name a file in a folder"),
    (SCRIPTS[:4], "--snapshot-path /dev/null", "--snapshot-path /dev/null: name a file in a "),
    (DDP, "--backend pigeon", "argument --backend: invalid choice: 'pigeon'"),
    (ELASTIC, "TORCHELASTIC_MAX_RESTARTS=3", "torchrun's --max-restarts goes with --resume, or"),
    (ELASTIC, "RANK=0", "RANK is set, but not LOCAL_WORLD_SIZE: use torchrun, or unset RANK"),
    (ELASTIC, "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NUM_TASKS is 2, but there is no RANK: start"),
    (ALONE, "WORLD_SIZE=2", "WORLD_SIZE is 2: start ddp_torchrun.py, or unset WORLD_SIZE"),
    (ALONE, "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NUM_TASKS is 2: start ddp_torchrun.py, or"),
    (ALONE, "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE is 2: start ddp_torchrun.py, or"),
    (ALONE, "PMI_SIZE=2", "PMI_SIZE is 2: start ddp_torchrun.py, or unset PMI_SIZE"),
    (NODES, "TORCHELASTIC_RUN_ID=x", "this script starts its own processes: torchrun starts"),
    (NODES, "--rank 0 --world-size 2 --snapshot-path /no/x.pt", "--snapshot-path /no/x.pt: name"),
    (NODES, "--rank 0", "give --rank and --world-size, or export RANK and WORLD_SIZE"),
    (NODES, "RANK=0", "give --rank and --world-size, or export RANK and WORLD_SIZE"),
    (NODES, "RANK=x WORLD_SIZE=2", "argument --rank: invalid int value: 'x'"),
    (NODES, "--rank 2 --world-size 2", "ranks 2 to 2 are not in 0 to 1"),
    (NODES, "--rank -2 --world-size 2", "ranks -2 to -2 are not in 0 to 1"),
    (NODES, "RANK=1 WORLD_SIZE=2 --nproc-per-node 2", "ranks 1 to 2 are not in 0 to 1"),
    (NODES, f"{FILE}relative/path", "--init-method file://relative/path: write file:///folder/"),
    (NODES, f"{FILE}/no/such/folder/x", "--init-method file:///no/such/folder/x: write file:///"),
]


@pytest.mark.parametrize(("scripts", "typed", "line"), MISTAKES)
def test_a_mistake(refuse, monkeypatch, scripts, typed, line):
    words = typed.split()
    while words and words[0][0].isupper():
        monkeypatch.setenv(*words.pop(0).split("="))
    for script in scripts:
        assert refuse(script, *words).startswith(line), script


def test_what_torch_says_itself(make):
    for words, said in (
        (("--sync-bn", "--model", "resnet18"), "SyncBatchNorm layers only work with GPU"),
        (("--backend", "NCCL"), "nccl2 requires|no GPUs found"),  # torch 2.15, and before
        (("--lr", -1), "Invalid learning rate: -1.0"),
        (("--num-workers", -1), "num_workers option should be non-negative"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=said):
            make("ddp_torchrun.py", *words)[1].train(1)
    assert not Path("checkpoint.pt").exists()


@pytest.mark.parametrize("script", ("ddp_torchrun.py", "multinode.py"))
def test_a_node_with_another_option(make, monkeypatch, script):
    """It ends with both values, and not later, in a collective that the others do not call."""

    def from_rank_0(message: list) -> None:
        message[0] = {**message[0], "lr": 0.5, "data_dir": "another", "num_workers": 7}

    monkeypatch.setattr(dist, "broadcast_object_list", from_rank_0)
    with pytest.raises(SystemExit, match=r"^error: lr is 0.5 on rank 0 and 0.25 on rank 0$"):
        make(script, "--lr", 0.25)
    make(script, "--lr", 0.5)


def test_a_rank_that_writes_nothing_needs_no_folder(parse):
    words = ("--rank", 1, "--world-size", 2, "--snapshot-path", "/no/x.pt")
    assert parse("multinode.py", *words)[1].snapshot_path == "/no/x.pt"


@pytest.mark.parametrize("launch", ["single_gpu.py", "ddp_spawn.py", TORCHRUN.format(2)])
def test_a_mistake_on_the_command_line(run, tmp_path, fashion, launch):
    """The line comes first. torchrun adds its report, and a rank that it has lost another."""
    (tmp_path / "checkpoint.pt").write_text("not one")
    text = run(launch, 1, *fashion(100, 10), "--resume", status=1)
    line = r"^error: checkpoint.pt is not a snapshot of these scripts \(.*\)\n"
    before, after = re.split(line, text, flags=re.M)
    ordinary = re.compile(r"total_epochs: |\[?rank |W\d+ ")
    assert all(ordinary.match(line) for line in before.splitlines()), text
    assert not after or launch != "single_gpu.py", text


def data_error(name: str, folder: Path | str, start: str, end: str) -> None:
    with pytest.raises(DataError) as caught:
        load_dataset(name, str(folder))
    line = caught.value.code  # of a SystemExit: Python prints it, and ends with status 1
    assert line.startswith(f"error: {start} (") and line.endswith(f"): {end}") and "\n" not in line


def test_damaged_files(tmp_path):
    path = idx_files(tmp_path, 100, 10) / "FashionMNIST/raw/train-images-idx3-ubyte"
    whole = path.read_bytes()
    other = idx_files(tmp_path / "other", 99, 10) / "FashionMNIST/raw/train-images-idx3-ubyte"
    start = f"FashionMNIST in {tmp_path} is damaged or incomplete"
    for damage in (whole[:5000], b"", other.read_bytes()):
        path.write_bytes(damage)
        data_error("fashion-mnist", tmp_path, start, "delete it there, and it is downloaded again")


@pytest.mark.parametrize(
    "error", [URLError("no network"), HTTPError("http://x", 404, "Not Found", Message(), None)]
)
def test_a_download_that_fails(monkeypatch, tmp_path, error):
    """Of the whole data set, and of the one file that is missing."""
    monkeypatch.setattr(urllib.request, "urlopen", Mock(side_effect=error))
    (idx_files(tmp_path, 100, 10) / "FashionMNIST/raw/t10k-labels-idx1-ubyte").unlink()
    end = "put its files there by hand, or use --dataset digits, which needs none"
    for name, dataset in zip(("MNIST", "FashionMNIST", "CIFAR10"), DATASETS[1:], strict=True):
        data_error(dataset, tmp_path, f"cannot download {name} to {tmp_path}", end)


def test_a_data_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "data", "/proc/data"):
        data_error(
            "mnist", folder, f"cannot use the data folder {folder}", "name another with --data-dir"
        )


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOLCK, "No locks"),
        NotImplementedError("no flock"),
    ],  # older filelocks': ENOSYS
)
def test_a_data_folder_on_a_disk_without_locks(monkeypatch, tmp_path, error):
    monkeypatch.setattr("common.data.FileLock", Mock(side_effect=error))
    start, end = f"cannot use the data folder {tmp_path}", "name another with --data-dir"
    data_error("mnist", tmp_path, start, end)
    folder = str(idx_files(tmp_path, 100, 10))
    assert len(load_dataset("fashion-mnist", folder)[0]) == 100  # what is there needs no lock


def test_torchvision_that_does_not_match_torch(monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("there is no operator nms")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    start = f"torchvision does not work with torch {torch.__version__}"
    end = "pip install --upgrade torch torchvision, the two together"
    data_error("mnist", tmp_path, start, end)
    with pytest.raises(DataError, match="error: torchvision does not work with torch"):
        build_model("resnet18", (1, 28, 28))
