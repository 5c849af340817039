"""Checksums of what tensors, samples and generators hold: what two ranks can compare."""

import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

LARGE = 1 << 16  # bytes of a sample; of more, every k-th number counts
LEAVES = 8  # parts of a sample that are looked at


def crc(thing: object) -> int:
    return zlib.crc32(thing if isinstance(thing, bytes) else repr(thing).encode())


def plain(tensor: torch.Tensor) -> bool:
    """Whether it holds numbers, and all of them."""
    return type(tensor.data).__name__ != "DTensor" and not tensor.is_meta


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, float]]:
    """Of each tensor, by name: a checksum of its bits, and its norm, which people can compare."""
    found = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
        flat = (flat[::61] if flat.numel() > 1 << 20 else flat).cpu().contiguous()  # of each row
        found[name] = zlib.crc32(flat.view(torch.uint8).numpy()), flat.float().norm().item()
    return found


def leaves(batch: Any, depth: int = 4) -> Iterator[Any]:
    """The tensors of a batch, and its lists of texts or numbers."""
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    if (
        torch.is_tensor(batch)
        or type(batch).__module__ == "numpy"
        or (isinstance(batch, list | tuple) and batch and isinstance(batch[0], str | int | float))
    ):
        yield batch
    elif depth and isinstance(batch, list | tuple):
        for part in batch[:64]:
            yield from leaves(part, depth - 1)
    elif depth and hasattr(batch, "__dict__") and not isinstance(batch, nn.Module):
        yield from leaves([*vars(batch).values()], depth - 1)


def rows(batch: Any, count: int | None = None) -> list[list[int]]:
    """Checksums of each sample of a batch, one for each of its parts."""
    parts = [leaf for leaf in leaves(batch) if len(getattr(leaf, "shape", " ")) > 0]
    lengths = [len(part) for part in parts]
    count = count or max(lengths, key=lengths.count, default=0)
    parts = [part for part in parts if len(part) == count][:LEAVES]
    return [[*sums] for sums in zip(*map(row_sums, parts), strict=True)]


def row_sums(part: Any) -> list[int]:
    if not torch.is_tensor(part) and type(part).__module__ != "numpy":
        return [crc(value) for value in part]
    if torch.is_tensor(part):
        flat = part.detach().cpu().reshape(len(part), -1).contiguous()
        part = flat.view(torch.uint8).numpy() if flat.numel() else flat.numpy()
    part = part.reshape(len(part), -1)
    part = part[:, :: max(1, part.shape[1] * part.itemsize // LARGE)]
    return [zlib.crc32(row.tobytes()) for row in part]


def states(dataset: Any = None) -> dict[str, int]:
    """Of torch's, Python's, NumPy's and the device's generators, and of those in a data set."""
    found = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        _, key, position, *_ = sys.modules["numpy"].random.get_state()
        found["numpy"] = key.tobytes(), position
    if torch.cuda.is_initialized():
        found["torch.cuda"] = torch.cuda.get_rng_state()
    found |= dict(generators(dataset, type(dataset).__name__)) if dataset is not None else {}
    arrays = {n: s.numpy().tobytes() if torch.is_tensor(s) else s for n, s in found.items()}
    return {name: crc(state) for name, state in arrays.items()}


def generators(thing: Any, name: str, depth: int = 4, seen: set | None = None) -> Iterator:
    """The states of the generators that an object holds, by their names."""
    seen = set() if seen is None else seen
    if id(thing) in seen or len(seen) > 500:
        return
    seen.add(id(thing))
    if (state := generator_state(thing)) is not None:
        yield name, state
    elif depth and isinstance(thing, list | tuple) and len(thing) < 64:
        for i, value in enumerate(thing):
            yield from generators(value, f"{name}[{i}]", depth - 1, seen)
    elif depth and hasattr(thing, "__dict__") and not isinstance(thing, type | nn.Module):
        for key, value in [*vars(thing).items()]:
            yield from generators(value, f"{name}.{key}", depth - 1, seen)
        module = sys.modules.get(type(thing).__module__)
        if module and (hasattr(thing, "__getitem__") or hasattr(thing, "__iter__")):
            for key, value in [*vars(module).items()]:  # those of the data set's own file
                if (state := generator_state(value)) is not None:
                    yield f"{module.__name__}.{key}", state


def generator_state(thing: Any) -> Any:
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, random.Random):
        return thing.getstate()
    if type(thing).__module__.startswith("numpy.random") and hasattr(thing, "bit_generator"):
        return repr(thing.bit_generator.state)
    return repr(thing.get_state()) if type(thing).__name__ == "RandomState" else None


def prints(dataset: Any, size: int) -> dict[str, int]:
    """Checksums of the attributes of a data set that hold something for each sample."""
    found, picked = {}, [k * (size - 1) // 63 for k in range(64)] if size else []
    for name, value in attributes(dataset):
        if not isinstance(value, list | tuple) and not hasattr(value, "shape"):
            continue
        if len(getattr(value, "shape", " ")) == 0 or len(value) != size:
            continue
        some = [value[k] for k in picked]
        if all(torch.is_tensor(v) or type(v).__module__ == "numpy" for v in some):
            found[name] = crc([row_sums(v.reshape(1, -1)) for v in some])
        elif all(isinstance(v, str | int | float | tuple) for v in some):
            found[name] = crc(some)
    return found


def numberings(dataset: Any, size: int | None) -> dict[str, tuple[int, int, bool]]:
    """Of the lists of its samples and of what it numbers: checksums of what, and of the order.

    The last of the three says whether it numbers something, as a dict of classes does.
    """
    found = {}
    for name, value in attributes(dataset):
        if not isinstance(value, dict | list) or not 1 < len(value) < 100_000:
            continue
        listed = isinstance(value, list) and (len(value) == size or name == "classes")
        if listed and all(isinstance(v, str | tuple) for v in value):
            texts = [*map(repr, value)]
        elif isinstance(value, dict) and [*map(repr, range(len(value)))] == sorted(
            map(repr, value.values()), key=lambda text: (len(text), text)
        ):
            texts = [repr(key) for key in sorted(value, key=lambda key: value[key])]
        else:
            continue
        if not any(" at 0x" in text for text in texts):
            numbers = isinstance(value, dict) or name == "classes"
            found[name] = crc(sorted(texts)), crc(texts), numbers
    return found


def attributes(dataset: Any) -> Iterator[tuple[str, Any]]:
    yield type(dataset).__name__, dataset
    for name, value in [*getattr(dataset, "__dict__", {}).items()]:
        yield name, value
        if isinstance(value, tuple | list) and len(value) <= 8:
            yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
