"""What a user gets wrong is one line of ours, once, and a status that is not 0. Nothing is lost.

More of them are in test_options.py, test_snapshots.py and test_devices.py.
"""

import re
import tempfile
import urllib.request
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import pytest
import torch
import torch.distributed as dist
from helpers.files import idx_files
from helpers.jobs import ROOT, SCRIPTS
from torch.utils.data import IterableDataset

from common.data import DATASETS, DataError, ImageDataset, load_dataset, make_digits
from common.loader import loader_options

DDP, ELASTIC, NODES = SCRIPTS[2:], SCRIPTS[3:4], SCRIPTS[4:]
RESTARTS = "TORCHELASTIC_MAX_RESTARTS=3"
HANG = "a restart may hang: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and use --standalone or"
# Scripts, what is typed (variables of the environment first, as in a shell), how the line begins.
MISTAKES = [
    (SCRIPTS, "five", "argument total_epochs: invalid positive value: 'five'"),
    (SCRIPTS, "--batch_size 1.5", "argument --batch-size/--batch_size: invalid positive value"),
    (SCRIPTS, "--batch-size 0", "argument --batch-size/--batch_size: 0 is less than 1"),
    (ELASTIC, "--accumulate 0", "argument --accumulate: 0 is less than 1"),
    (SCRIPTS, "--bach-size 8", "unrecognized arguments: --bach-size"),
    (SCRIPTS[:1] + DDP, "--device cuda", "argument --device: invalid choice: 'cuda'"),  # not here
    (SCRIPTS[:4], "--snapshot-path /no/x.pt", "--snapshot-path /no/x.pt: name a file in an "),
    (SCRIPTS[:4], "--snapshot-path /dev/null", "--snapshot-path /dev/null: name a file in an "),
    (SCRIPTS[:3], "WORLD_SIZE=2", "WORLD_SIZE is 2: use torchrun with ddp_torchrun.py"),
    (ELASTIC, RESTARTS, "--max-restarts without --resume: a restart would begin at epoch 0"),
    (ELASTIC, f"{RESTARTS} TORCHELASTIC_USE_AGENT_STORE=True --resume", HANG),
    (NODES, "TORCHELASTIC_RUN_ID=x", "this script starts its own processes: use torchrun"),
    (NODES, "--rank 0 --world-size 2 --snapshot-path /no/x.pt", "--snapshot-path /no/x.pt: name"),
    (NODES, "--rank 0", "give --rank and --world-size, or export RANK and WORLD_SIZE"),
    (NODES, "RANK=0", "give --rank and --world-size, or export RANK and WORLD_SIZE"),
    (NODES, "--rank 2 --world-size 2", "ranks 2 to 2 are not in 0 to 1"),
    (NODES, "--rank -2 --world-size 2", "ranks -2 to -2 are not in 0 to 1"),
    (NODES, "RANK=1 WORLD_SIZE=2 --nproc-per-node 2", "ranks 1 to 2 are not in 0 to 1"),
]


@pytest.mark.parametrize(("scripts", "typed", "line"), MISTAKES)
def test_a_mistake(refuse, monkeypatch, scripts, typed, line):
    words = typed.split()
    while words and words[0][0].isupper():
        monkeypatch.setenv(*words.pop(0).split("="))
    for script in scripts:
        assert refuse(script, *words).startswith(line), script


def test_ddp_torchrun_without_torchrun_is_not_as_many_jobs_that_write_one_file(run, tmp_path):
    """As `srun -n 8 python ddp_torchrun.py` would start them."""
    text = run("ddp_torchrun.py", status=2, SLURM_PROCID=1, SLURM_NTASKS=8)
    line = "error: start it with torchrun: torchrun --nproc_per_node=gpu ddp_torchrun.py\n"
    assert text.endswith(line) and len(text.splitlines()) == 2
    assert not (tmp_path / "checkpoint.pt").exists()


class Crops(ImageDataset):
    """Each sample is four crops of an image, which a collate function has put side by side."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return super().__getitems__([index for index in indices for _ in range(4)])


@pytest.mark.parametrize("options", [(), ("--accumulate", 4)])
def test_several_targets_of_a_sample_would_make_the_gradient_larger(do, monkeypatch, options):
    """Silently: each micro-batch counts by its share of the step's samples."""
    data = make_digits(40, 0)
    data.__class__ = Crops
    monkeypatch.setattr(do.module("ddp_torchrun.py"), "load_dataset", lambda *_: (data, []))
    with pytest.raises(SystemExit, match="error: 32 targets for 8 samples: give one each"):
        do("ddp_torchrun.py", 1, "--model", "mlp", "--batch-size", 8, *options)
    assert not Path("checkpoint.pt").exists()


@pytest.mark.parametrize("length", [False, True])
def test_a_stream_in_place_of_the_data_set_has_its_row(do, monkeypatch, length):
    methods = {"__iter__": lambda _: iter([])} | ({"__len__": lambda _: 40} if length else {})
    stream = type("Stream", (IterableDataset,), methods)()
    monkeypatch.setattr(do.module("ddp_torchrun.py"), "load_dataset", lambda *_: (stream, []))
    message = "expected unspecified sampler option" if length else "has no len()"
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        do("ddp_torchrun.py", 1)
    assert f"`{message}`" in (ROOT / "docs" / "errors.md").read_text()


@pytest.mark.slow("torchrun")
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("if rank == 1: dist.all_reduce(own)", "Connection closed by peer"),
        ("dist.all_gather([own, own + 0], own)", "Received data size doesn't match expected size"),
    ],
)
def test_a_rank_that_leaves_early_or_has_fewer_samples(run, tmp_path, program, message):
    lines = ["import torch, torch.distributed as dist", 'dist.init_process_group("gloo")']
    lines += ["rank = dist.get_rank()", "own = torch.zeros(1000 + rank)"]
    lines += ["dist.all_reduce(torch.zeros(1))", program]
    (tmp_path / "program.py").write_text("\n".join(lines))
    launch = f"torchrun --standalone --nproc_per_node=2 {tmp_path}/program.py"
    assert message in run(launch, status=1)
    assert f"`{message}`" in (ROOT / "docs" / "pitfalls.md").read_text()


def test_a_temporary_folder_whose_path_is_too_long_for_workers(monkeypatch):
    """Without the line, the workers fail and the ranks wait for ever. 75 characters work."""
    monkeypatch.setattr(tempfile, "tempdir", f"/{'x' * 74}")
    assert loader_options("cpu", 1)["num_workers"] == 1
    monkeypatch.setattr(tempfile, "tempdir", f"/{'x' * 75}")
    with pytest.raises(SystemExit, match=r"a shorter path than /x+: export TMPDIR=/tmp"):
        loader_options("cpu", 1)
    assert "num_workers" not in loader_options("cpu", 0)


def test_what_is_no_mistake(parse, monkeypatch):
    """A rank above 0 writes nothing. Restarts have a store of their own, or there are none."""
    parse("multinode.py", "--rank", 1, "--world-size", 2, "--snapshot-path", "/no/x.pt")
    for restarts, shared, *options in (("3", "False", "--resume"), ("0", "True")):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
        parse("ddp_torchrun.py", *options)


@pytest.mark.parametrize("script", ("ddp_torchrun.py", "multinode.py"))
def test_a_node_with_another_option_data_set_or_snapshot(do, parse, monkeypatch, script):
    """All ranks end with the same line. The options are compared before data is loaded."""

    def line(*others: dict, lr: float = 0.1) -> str | None:
        """Where the ranks have these values, and all others are as this process has them."""

        def all_gather_object(ranks: list, own: dict) -> None:
            ranks[:] = [own | other for other in others]

        monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
        try:
            do(script, 1, "--model", "mlp", "--lr", lr, *resume)
        except SystemExit as error:
            return error.code.removesuffix(": it must be the same on all nodes")

    resume = ()
    assert line({}, dict.fromkeys(parse(script)[0].MAY_DIFFER, "another")) is None
    for name, own in ("train_size", 40), ("val_size", 10), ("snapshot's epoch", 0):
        assert line({name: 3}, {}) == f"error: {name} is 3 on rank 0, and {own} on rank 1"
    for said in line({}, {}, {"lr": 0.5}), line({"lr": 0.1}, {"lr": 0.1}, {}, lr=0.5):
        assert said == "error: lr is 0.1 on rank 0, and 0.5 on rank 2"
        # else gloo may abort Python at its exit
        assert do.last.calls == [("destroy_process_group",)]
    resume = ("--resume",)  # of the run above
    name = "snapshot's epoch"
    assert line({}, {name: 0}) == f"error: {name} is 1 on rank 0, and 0 on rank 1"
    name = "sum of the snapshot's weights"
    assert line({}, {name: "?"}).startswith(f"error: {name} is ")
    if script == "ddp_torchrun.py":
        name = "snapshot's samples_seen"
        assert line({name: 3}, {}) == f"error: {name} is 3 on rank 0, and 0 on rank 1"


def test_a_mistake_on_the_command_line(run, tmp_path, fashion):
    """The line comes from each rank that mp.spawn has not ended before. (torchrun's ranks:
    test_torchrun.py)"""
    torch.save({"args": {"dataset": "mnist"}}, tmp_path / "checkpoint.pt")
    lines = run("ddp_spawn.py", 1, *fashion(100, 10), "--resume", status=1).splitlines()
    line = "error: checkpoint.pt was made with dataset mnist, not fashion-mnist"
    ordinary = re.compile(rf"total_epochs: |\[?rank |\[?W\d+ |{line}$")
    assert line in lines and all(ordinary.match(line) for line in lines), lines


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


def test_a_download_that_fails(monkeypatch, tmp_path):
    """Of the whole data set, and of the one file that is missing."""
    monkeypatch.setattr(urllib.request, "urlopen", Mock(side_effect=URLError("no network")))
    (idx_files(tmp_path, 100, 10) / "FashionMNIST/raw/t10k-labels-idx1-ubyte").unlink()
    end = "put its files there by hand, or use --dataset digits, which needs none"
    for name, dataset in zip(("MNIST", "FashionMNIST", "CIFAR10"), DATASETS[1:], strict=True):
        data_error(dataset, tmp_path, f"cannot download {name} to {tmp_path}", end)


def test_a_data_folder_that_cannot_be_written():
    start, end = "cannot use the data folder /proc/data", "name another with --data-dir"
    data_error("mnist", "/proc/data", start, end)
