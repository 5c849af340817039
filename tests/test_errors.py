"""What a user gets wrong is one line of ours, once, and a status that is not 0. Nothing is lost.

More of them: below an option's range in test_options.py, snapshots that do not fit in
test_snapshots.py, more processes than devices in test_devices.py, ranks in test_joining.py.
"""

import re
import sys
import urllib.request
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest
import torch
from helpers.files import idx_files
from helpers.jobs import ALONE, SCRIPTS, TORCHRUN

from common.data import DATASETS, DataError, load_dataset
from common.model import build_model

DDP, ELASTIC, NODES = SCRIPTS[2:], SCRIPTS[3:4], SCRIPTS[4:]
SPAWNS = ("ddp_spawn.py", "multinode.py")
CHOOSES = tuple(script for script in SCRIPTS if script != "data_parallel.py")  # its device
WORLD = "--world-size 2 --rank 1"
FILE = f"{WORLD} --init-method file://"
FOLDER = "name a file in a folder that you may write to"
# Scripts, what is typed (variables of the environment first, as in a shell), how the line begins.
MISTAKES = [
    (SCRIPTS, "five", "argument total_epochs: invalid number value: 'five'"),
    (SCRIPTS, "--batch_size 1.5", "argument --batch-size/--batch_size: invalid number value"),
    (SCRIPTS, "--lr nan", "argument --lr: nan is less than 0.0"),
    (SCRIPTS, "--bach-size 8", "unrecognized arguments: --bach-size"),
    (SCRIPTS, "--dataset imagenet", "argument --dataset: invalid choice: 'imagenet'"),
    (SCRIPTS, "--model gpt", "argument --model: invalid choice: 'gpt'"),
    (CHOOSES, "--device cuda", "argument --device: invalid choice: 'cuda'"),  # there is none here
    (SCRIPTS, "--snapshot-path no/x.pt", f"--snapshot-path no/x.pt: {FOLDER}"),
    (SCRIPTS, "--snapshot-path .", f"--snapshot-path .: {FOLDER}"),
    (SCRIPTS, "--snapshot-path /dev/null", f"--snapshot-path /dev/null: {FOLDER}"),
    (DDP, "--backend NCCL", "--backend nccl does not work on cpu here: leave it out"),
    (DDP, "--backend pigeon", "--backend pigeon does not work on cpu here: leave it out"),
    (ELASTIC, "TORCHELASTIC_MAX_RESTARTS=3", "torchrun's --max-restarts goes with --resume, or"),
    (ELASTIC, "RANK=0", "RANK is set, but not LOCAL_WORLD_SIZE: use torchrun, or unset RANK"),
    (SPAWNS, "TORCHELASTIC_RUN_ID=x", "torchrun starts ddp_torchrun.py; this script starts its"),
    (NODES, "--rank 0", "give --rank and --world-size, or export RANK and WORLD_SIZE"),
    (NODES, "RANK=0", "give --rank and --world-size, or export RANK and WORLD_SIZE"),
    (NODES, "RANK=x WORLD_SIZE=2", "argument --rank: invalid number value: 'x'"),
    (NODES, "--world-size 2 --rank 2", "rank 2 is not in a world of 2: ranks count from 0"),
    (NODES, "RANK=2 WORLD_SIZE=2", "rank 2 is not in a world of 2: ranks count from 0"),
    (NODES, f"{WORLD} --nproc-per-node 2", "rank 2 is not in a world of 2: ranks count from 0"),
    (NODES, f"{FILE}relative/path", "--init-method file://relative/path: write file:///folder/"),
    (NODES, f"{FILE}/no/such/folder/x", "--init-method file:///no/such/folder/x: write file:///"),
]


@pytest.mark.parametrize(
    ("script", "typed", "line"),
    [(script, typed, line) for scripts, typed, line in MISTAKES for script in scripts],
)
def test_a_mistake(refuse, monkeypatch, script, typed, line):
    words = typed.split()
    while words and words[0][0].isupper():
        monkeypatch.setenv(*words.pop(0).split("="))
    assert refuse(script, *words).startswith(line)


def test_torchrun_repeats_no_mistake_at_a_restart(command_line, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for words in (["--lr", "nan"], ["--snapshot-path", "."]):
        with pytest.raises(SystemExit, match="2"):
            command_line("ddp_torchrun.py", *words).parse_args()
    assert capsys.readouterr() == ("", "")


def test_what_torch_says_itself(make, monkeypatch):
    """Of SyncBatchNorm on a CPU, and of TensorBoard that is not installed."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for words, said in (
        (("--sync-bn", "--model", "resnet18"), "SyncBatchNorm layers only work with GPU"),
        (("--log-dir", "runs"), "tensorboard"),
    ):
        with pytest.raises((ValueError, ImportError), match=said):
            make("ddp_torchrun.py", *words)[1].train(1)
    assert not Path("checkpoint.pt").exists()


slow = pytest.mark.slow("the same in another script")


@pytest.mark.parametrize(
    "launch",
    [
        ("single_gpu.py",),
        ("ddp_spawn.py",),
        (TORCHRUN.format(2),),
        pytest.param(("data_parallel.py",), marks=slow),
        pytest.param(("multinode.py", *ALONE[:-1], 2, "--nproc-per-node", 2), marks=slow),
    ],
)
def test_a_mistake_on_the_command_line(run, tmp_path, fashion, launch):
    """The line comes first. torchrun adds its report, and a rank that it has lost another."""
    snapshot = tmp_path / "checkpoint.pt"
    snapshot.write_text("not one")
    text = run(*launch, 1, *fashion(100, 10), "--resume", status=1)
    line = r"^error: checkpoint.pt is not a snapshot of these scripts \(.*\)\n"
    before, after = re.split(line, text, flags=re.M)
    ordinary = re.compile(r"total_epochs: |\[?rank |W\d+ ")
    assert all(ordinary.match(line) for line in before.splitlines()), text
    assert not after or launch[0] not in SCRIPTS[:2], text
    assert snapshot.read_text() == "not one"


# --- data, in the tests' own process --------------------------------------------------------------


def data_error(name: str, folder: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset(name, str(folder))
    assert "\n" not in caught.value.code
    return caught.value.code  # of a SystemExit: Python prints it, and ends with status 1


def test_damaged_files(tmp_path):
    path = idx_files(tmp_path, 100, 10) / "FashionMNIST/raw/train-images-idx3-ubyte"
    whole = path.read_bytes()
    other = idx_files(tmp_path / "other", 99, 10) / "FashionMNIST/raw/train-images-idx3-ubyte"
    for damage in (whole[:5000], b"", other.read_bytes()):
        path.write_bytes(damage)
        line = data_error("fashion-mnist", tmp_path)
        assert line.startswith(f"error: FashionMNIST in {tmp_path} is damaged or incomplete (")
        assert line.endswith(": delete it there, and it is downloaded again")


@pytest.mark.parametrize(
    "error", [URLError("no network"), HTTPError("http://x", 404, "Not Found", Message(), None)]
)
def test_a_download_that_fails(monkeypatch, tmp_path, error):
    """Of the whole data set, and of the one file that is missing."""

    def urlopen(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    (idx_files(tmp_path, 100, 10) / "FashionMNIST/raw/t10k-labels-idx1-ubyte").unlink()
    for name, dataset in zip(("MNIST", "FashionMNIST", "CIFAR10"), DATASETS[1:], strict=True):
        line = data_error(dataset, tmp_path)
        assert line.startswith(f"error: cannot download {name} to {tmp_path} (")
        assert line.endswith(
            ": put its files there by hand, or use --dataset digits, which needs none"
        )


def test_a_data_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "data", "/proc/data"):
        line = data_error("mnist", folder)
        assert line.startswith(f"error: cannot use the data folder {folder} (")
        assert line.endswith(": name another with --data-dir")


def test_torchvision_that_does_not_match_torch(monkeypatch, tmp_path):
    program = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    line = data_error("mnist", tmp_path)
    assert line.startswith(f"error: torchvision does not work with torch {torch.__version__} (")
    assert line.endswith("): pip install --upgrade torch torchvision, the two together")
    with pytest.raises(DataError, match="error: torchvision does not work with torch"):
        build_model("resnet18", (1, 28, 28))
