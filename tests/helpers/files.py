"""The files that jobs read and write: data sets, snapshots."""

import re
import struct
from pathlib import Path

import numpy as np
import torch


def load(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)  # maybe an accelerator's


def same_bytes(a: dict, b: dict) -> bool:
    """Whether two snapshots' weights and momenta are the same, bit for bit."""
    return difference(a, b) == 0


def difference(a: dict, b: dict) -> float:
    """The largest difference between two snapshots' weights and their optimizers' states."""
    assert a["model"].keys() == b["model"].keys()
    assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys() != set()
    pairs = [(a["model"][name], b["model"][name]) for name in a["model"]]
    for index, state in a["optimizer"]["state"].items():
        other = b["optimizer"]["state"][index]
        pairs += [(state[name], other[name]) for name in state if torch.is_tensor(state[name])]
    # torch's max, as Python's would pass over a NaN
    return torch.stack([(x.double() - y.double()).abs().max() for x, y in pairs]).max().item()


def idx_files(folder: Path, train: int, test: int, seed: int = 0, size: int = 28) -> Path:
    """Fashion-MNIST-shaped files in torchvision's place below `folder`, learnable, of any size."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    prototypes = np.random.default_rng(1).integers(0, 256, (10, size, size))
    rng = np.random.default_rng(seed)
    for part, count in (("train", train), ("t10k", test)):
        labels = rng.integers(0, 10, min(count, 5_000))
        noise = rng.normal(60, 40, (len(labels), size, size))
        images = np.clip(prototypes[labels] / 2 + noise, 0, 255).astype("u1")
        labels = np.resize(labels, count)  # more of them are the first ones again
        images = np.resize(images, (count, size, size))
        header = struct.pack(">IIII", 0x803, count, size, size)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 0x801, count)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.astype("u1").tobytes())
    return folder


def patched(text: str, diff: str) -> str:
    """The text with this diff's changes, whose hunks begin with @@ and have old lines that stand
    there just once."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in sign) for sign in (" -", " +"))
        assert text.count(old) == 1, f"{text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    return text
