"""What the scripts share is the same in all of them, so that a step's diff shows only its idea.

To the letter, with its comments, in the scripts of a group. Where a script has lines of its own,
these are declared.
"""

import ast
import re

import pytest
from helpers.jobs import ROOT, SCRIPTS

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
ONE, FROM_SPAWN, DDP = SCRIPTS[:2], (SPAWN, NODES), SCRIPTS[2:]

# function: its groups, the first script of which the others are compared with
GROUPS = {
    "Trainer.__init__": [FROM_SPAWN],
    "Trainer._run_batch": [(SINGLE, PARALLEL, SPAWN, NODES)],
    "Trainer._run_epoch": [ONE, FROM_SPAWN],
    "Trainer._evaluate": [ONE, FROM_SPAWN],
    "Trainer.train": [ONE, FROM_SPAWN],
    "Trainer._save_snapshot": [(PARALLEL, SPAWN, NODES)],
    "Trainer._load_snapshot": [ONE, FROM_SPAWN],
    "load_train_objs": [SCRIPTS],
    "prepare_dataloader": [SCRIPTS],
    "stop": [FROM_SPAWN],
    "read_snapshot": [(SINGLE, PARALLEL, SPAWN, NODES)],
    "log": [ONE, FROM_SPAWN],
    "default_backend": [DDP],
    "positive": [SCRIPTS],
}
SAME = [
    pytest.param(name, first, other, id=f"{name}-{first}-{other}")
    for name, groups in GROUPS.items()
    for first, *others in groups
    for other in others
]
# function, two scripts, the lines that only the first has, and those that only the second has
BUT_FOR = [
    (
        "Trainer._save_snapshot",
        (SINGLE, SPAWN),
        ['"model": self.model.state_dict(),'],
        ['"model": self.model.module.state_dict(),'],
    ),
    (
        "Trainer._load_snapshot",
        (SINGLE, SPAWN),
        ["snapshot = read_snapshot(self.args)"],
        [
            "snapshots = [read_snapshot(self.args) if self.rank == 0 else None]",
            "dist.broadcast_object_list(snapshots)  "
            "# rank 0 reads it, and all start from the same one",
            "snapshot = snapshots[0]",
        ],
    ),
    (
        "compare_options",
        (TORCHRUN, NODES),
        ['may_differ = {"data_dir", "snapshot_path", "num_workers", "local_rank"}'],
        [
            'may_differ = {"rank", "nproc_per_node", "first_device", "init_method", "address"}',
            'may_differ |= {"data_dir", "snapshot_path", "num_workers"}',
        ],
    ),
    (
        "read_snapshot",
        (SPAWN, TORCHRUN),
        [
            'if snapshot.get("samples_seen"):',
            'sys.exit(f"error: {path} was saved in mid-epoch: go on with ddp_torchrun.py")',
        ],
        [],
    ),
]


def lines(script: str, name: str, comments: bool = True) -> list[str]:
    """Of a function, without its indentation."""
    source = (ROOT / script).read_text()
    body = ast.parse(source).body
    for part in name.split("."):
        (node,) = (node for node in body if getattr(node, "name", "") == part)
        body = node.body
    text = ast.get_source_segment(source, node) if comments else ast.unparse(node)
    return [line.strip() for line in text.splitlines()]


@pytest.mark.parametrize(("name", "first", "other"), SAME)
def test_a_function_is_the_same(name, first, other):
    comments = name != "Trainer._run_batch"  # where the gradients travel is another thing in each
    assert lines(first, name, comments) == lines(other, name, comments)


@pytest.mark.parametrize(("name", "scripts", "first", "second"), BUT_FOR)
def test_a_function_is_the_same_but_for_its_declared_lines(name, scripts, first, second):
    one, two = (lines(script, name) for script in scripts)
    assert [line for line in one if line not in two] == first
    assert [line for line in two if line not in one] == second
    assert [line for line in one if line in two] == [line for line in two if line in one]


def options(script: str) -> dict[str, str]:
    calls = re.findall(r"^    (add\(.*)$", (ROOT / script).read_text(), re.M)
    return {re.search(r'"([^"]+)"', call)[1]: call for call in calls}


def test_an_option_is_the_same_in_all_scripts_that_have_it():
    """But for what --batch-size is to nn.DataParallel, and how many processes are the default."""
    differ, found = {("--batch-size", PARALLEL), ("--nproc-per-node", NODES)}, set()
    for script in SCRIPTS:
        for other in SCRIPTS:
            mine, theirs = options(script), options(other)
            assert len(mine) >= 15
            for name in mine.keys() & theirs.keys():
                if mine[name] != theirs[name]:
                    found |= {(name, script), (name, other)} & differ or {(name, script, other)}
            shared = [name for name in mine if name in theirs]
            assert shared == [name for name in theirs if name in mine], (script, other)  # the order
    assert found == differ
