"""What a user gets wrong is one line, once, and a status that is not 0. A snapshot that exists and
weights that are NaN: test_snapshots.py."""

import re
from unittest.mock import Mock
from urllib.error import URLError

import pytest
from helpers.files import idx_files
from helpers.jobs import SCRIPTS

from common.data import DATASETS, load_dataset

TORCHRUN, NODES = SCRIPTS[3:4], SCRIPTS[4:]
RANK = "give --rank and --world-size, or export RANK and WORLD_SIZE"
# Scripts, the variable of the environment that is missing, what is typed, how the line begins.
MISTAKES = [
    (SCRIPTS, "", "five", "argument total_epochs: invalid int value: 'five'"),
    (SCRIPTS, "", "--batch_size 1.5", "argument --batch-size/--batch_size: invalid int value"),
    (SCRIPTS, "", "--bach-size 8", "unrecognized arguments: --bach-size"),
    (SCRIPTS[:1] + SCRIPTS[2:], "", "--device cuda", "argument --device: invalid choice: 'cuda'"),
    (TORCHRUN, "LOCAL_RANK", "", "start it with torchrun --nproc_per_node=2 ddp_torchrun.py"),
    (NODES, "RANK", "--world-size 2", RANK),
    (NODES, "WORLD_SIZE", "--rank 1", RANK),
]


@pytest.mark.parametrize(("scripts", "missing", "typed", "line"), MISTAKES)
def test_a_mistake(refuse, monkeypatch, tmp_path, scripts, missing, typed, line):
    for script in scripts:
        if missing:
            monkeypatch.delenv(missing)
        assert refuse(script, *typed.split()).startswith(line), script
    assert not [*tmp_path.iterdir()]


def data_error(name: str, folder: object, reason: str) -> None:
    with pytest.raises(SystemExit) as caught:
        load_dataset(name, str(folder))
    start = f"error: cannot load \\w+ from {re.escape(str(folder))} \\({reason}.*\\): "
    end = "name its folder with --data-dir, delete what is damaged there, or use --dataset digits"
    assert re.fullmatch(start + end, caught.value.code), caught.value.code


def test_damaged_files(tmp_path):
    path = idx_files(tmp_path, 100, 10) / "FashionMNIST/raw/train-images-idx3-ubyte"
    whole = path.read_bytes()
    other = idx_files(tmp_path / "other", 99, 10) / "FashionMNIST/raw/train-images-idx3-ubyte"
    for damage, reason in ((whole[:5000], ""), (b"", ""), (other.read_bytes(), "99 images do not")):
        path.write_bytes(damage)
        data_error("fashion-mnist", tmp_path, reason)


def test_a_download_that_fails(monkeypatch, tmp_path):
    """Of the whole data set, and of the one file that is missing."""
    no_network = Mock(side_effect=URLError("no network"))
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    (idx_files(tmp_path, 100, 10) / "FashionMNIST/raw/t10k-labels-idx1-ubyte").unlink()
    for name in DATASETS[1:]:
        data_error(name, tmp_path, "<urlopen error no network>")
