"""What the scripts share is the same in all of them, so that a step's diff shows only its idea.

To the letter, with its comments. Where a script has lines of its own, these are declared.
"""

import ast
import difflib
import re

import pytest
from helpers.jobs import ROOT, SCRIPTS

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS

# function, two scripts: the lines that only the first (-) or only the second has (+)
SAME = {
    **{("evaluate", SINGLE, other): "" for other in SCRIPTS[1:]},
    **{("positive", SINGLE, other): "" for other in SCRIPTS[1:]},
    ("train_epoch", SINGLE, PARALLEL): "",
    ("train_epoch", SINGLE, SPAWN): """\
- progress = tqdm(loader, leave=False, disable=None)
+ hidden = True if dist.get_rank() > 0 else None
+ progress = tqdm(loader, leave=False, disable=hidden)
- loss.backward()
+ loss.backward()
- log(f"Epoch {epoch} | Step {step} | Loss: {loss.item():.4f}")
+ log(f"Epoch {epoch} | Step {step} | Loss of rank 0: {loss.item():.4f}")
""",
    ("train_epoch", SPAWN, NODES): "",
    ("main", SINGLE, PARALLEL): """\
+ model = nn.DataParallel(model)
""",
    ("main", SPAWN, NODES): """\
- def main(rank, args):
+ def main(local_rank, args):
- device = ddp_setup(rank, args)
- world_size = dist.get_world_size()
+ device = ddp_setup(local_rank, args)
+ rank, world_size = dist.get_rank(), dist.get_world_size()
+ same_on_all_ranks(vars(args))
+ own = {"train_size": len(train_set), "val_size": len(val_set), "snapshot's epoch": first_epoch}
+ if args.resume:
+ weights = sum(weight.cpu().double().sum().item() for weight in model.parameters())
+ own["sum of the snapshot's weights"] = f"{weights:.9g}"
+ same_on_all_ranks(own)
""",
    ("same_on_all_ranks", TORCHRUN, NODES): "",
    ("save_snapshot", SINGLE, PARALLEL): "",
    ("save_snapshot", SINGLE, SPAWN): """\
+ if dist.get_rank() > 0:
+ return
""",
    ("save_snapshot", SPAWN, NODES): "",
    ("save_snapshot", SPAWN, TORCHRUN): '''\
- def save_snapshot(args, parts, epoch):
- """Save the parts and the number of finished epochs, whole or not at all."""
+ def save_snapshot(args, parts, epoch, samples_seen=0):
+ """Save the parts and how far the run is, whole or not at all."""
- snapshot["epoch"] = epoch
+ snapshot |= {"epoch": epoch, "samples_seen": samples_seen}
''',
    **{("load_snapshot", SINGLE, other): "" for other in (PARALLEL, SPAWN, NODES)},
    ("log", SINGLE, PARALLEL): "",
    **{("log", SPAWN, other): "" for other in (TORCHRUN, NODES)},
    **{("default_backend", SPAWN, other): "" for other in (TORCHRUN, NODES)},
}


def lines(script: str, name: str) -> list[str]:
    """Of a function, without its indentation."""
    text = (ROOT / script).read_text()
    (node,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == name)
    return [line.strip() for line in text.splitlines()[node.lineno - 1 : node.end_lineno]]


@pytest.mark.parametrize(("name", "first", "other"), SAME)
def test_a_function_is_the_same_but_for_its_declared_lines(name, first, other):
    found = [*difflib.unified_diff(lines(first, name), lines(other, name), n=0, lineterm="")][2:]
    found = [f"{line[0]} {line[1:].split('  #')[0]}" for line in found if line[0] in "-+"]
    assert found == SAME[name, first, other].splitlines()


def options(script: str) -> dict[str, str]:
    calls = re.findall(r"^    (add\(.*)$", (ROOT / script).read_text(), re.M)
    return {re.search(r'"([^"]+)"', call)[1]: call for call in calls}


def test_an_option_is_the_same_in_all_scripts_that_have_it():
    """But for what has a batch, and how many processes are the default."""
    differ = {("--batch-size", SINGLE), ("--batch-size", PARALLEL), ("--nproc-per-node", NODES)}
    found = set()
    for script in SCRIPTS:
        for other in SCRIPTS:
            mine, theirs = options(script), options(other)
            assert len(mine) >= 13
            for name in mine.keys() & theirs.keys():
                if mine[name] != theirs[name]:
                    found |= {(name, script), (name, other)} & differ or {(name, script, other)}
    assert found == differ
