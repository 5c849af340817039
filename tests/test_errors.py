"""What a user gets wrong is one line of ours, once, and a status that is not 0. Nothing is lost.

More of them are in test_options.py, test_snapshots.py and test_devices.py.
"""

import re
import sys
import urllib.request
from email.message import Message
from pathlib import Path
from unittest.mock import Mock
from urllib.error import HTTPError, URLError

import pytest
import torch
from helpers.files import idx_files
from helpers.jobs import NODE2, SCRIPTS, TORCHRUN

from common.data import DATASETS, DataError, load_dataset
from common.model import build_model

DDP, ELASTIC, NODES = SCRIPTS[2:], SCRIPTS[3:4], SCRIPTS[4:]
SPAWNS = ("ddp_spawn.py", "multinode.py")
FILE = "--world-size 2 --rank 1 --init-method file://"
# Scripts, what is typed (variables of the environment first, as in a shell), how the line begins.
MISTAKES = [
    (SCRIPTS, "five", "argument total_epochs: invalid number value: 'five'"),
    (SCRIPTS, "--batch_size 1.5", "argument --batch-size/--batch_size: invalid number value"),
    (SCRIPTS, "--lr nan", "argument --lr: nan is less than 0.0"),
    (SCRIPTS, "--bach-size 8", "unrecognized arguments: --bach-size"),
    (SCRIPTS, "--dataset imagenet", "argument --dataset: invalid choice: 'imagenet'"),
    (SCRIPTS, "--model gpt", "argument --model: invalid choice: 'gpt'"),
    (SCRIPTS[:1] + DDP, "--device cuda", "argument --device: invalid choice: 'cuda'"),  # not here
    (SCRIPTS, "--snapshot-path /no/x.pt", "--snapshot-path /no/x.pt: name a file in a folder that"),
    (SCRIPTS, "--snapshot-path /dev/null", "--snapshot-path /dev/null: name a file in a folder "),
    (DDP, "--backend NCCL", "--backend nccl does not work on cpu here: leave it out"),
    (DDP, "--backend pigeon", "--backend pigeon does not work on cpu here: leave it out"),
    (ELASTIC, "TORCHELASTIC_MAX_RESTARTS=3", "torchrun's --max-restarts goes with --resume, or"),
    (ELASTIC, "RANK=0", "RANK is set, but not LOCAL_WORLD_SIZE: use torchrun, or unset RANK"),
    (SPAWNS, "TORCHELASTIC_RUN_ID=x", "torchrun starts ddp_torchrun.py; this script starts its"),
    (NODES, "--rank 0", "give --rank and --world-size, or export RANK and WORLD_SIZE"),
    (NODES, "RANK=0", "give --rank and --world-size, or export RANK and WORLD_SIZE"),
    (NODES, "RANK=x WORLD_SIZE=2", "argument --rank: invalid number value: 'x'"),
    (NODES, "--rank 2 --world-size 2", "rank 2 is not in a world of 2: ranks count from 0"),
    (NODES, "RANK=1 WORLD_SIZE=2 --nproc-per-node 2", "rank 2 is not in a world of 2: ranks"),
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


def test_torchrun_repeats_no_mistake_at_a_restart(command_line, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for words in (["--lr", "nan"], ["--snapshot-path", "."]):
        with pytest.raises(SystemExit, match="2"):
            command_line("ddp_torchrun.py", *words).parse_args()
    assert capsys.readouterr() == ("", "")


def test_what_torch_says_itself(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)  # another test's
    for words, said in (
        (("--sync-bn", "--model", "resnet18"), "SyncBatchNorm layers only work with GPU"),
        (("--log-dir", "runs"), "tensorboard"),
    ):
        with pytest.raises((ValueError, ImportError), match=said):
            make("ddp_torchrun.py", *words)[1].train(1)
    assert not Path("checkpoint.pt").exists()


@pytest.mark.parametrize(
    "launch",
    [
        ("single_gpu.py",),
        ("ddp_spawn.py",),
        (TORCHRUN.format(2),),
        pytest.param(NODE2, marks=pytest.mark.slow("the same in another script")),
    ],
)
def test_a_mistake_on_the_command_line(run, tmp_path, fashion, launch):
    """The line comes first. torchrun adds its report, and a rank that it has lost another."""
    (tmp_path / "checkpoint.pt").write_text("not one")
    text = run(*launch, 1, *fashion(100, 10), "--resume", status=1)
    line = r"^error: checkpoint.pt is not a snapshot of these scripts \(.*\)\n"
    before, after = re.split(line, text, flags=re.M)
    ordinary = re.compile(r"total_epochs: |\[?rank |W\d+ ")
    assert all(ordinary.match(line) for line in before.splitlines()), text
    assert not after or launch[0] != "single_gpu.py", text


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


def test_torchvision_that_does_not_match_torch(monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("there is no operator nms")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    start = f"torchvision does not work with torch {torch.__version__}"
    end = "pip install --upgrade torch torchvision, the two together"
    data_error("mnist", tmp_path, start, end)
    with pytest.raises(DataError, match="error: torchvision does not work with torch"):
        build_model("resnet18", (1, 28, 28))
