"""What the scripts share is the same in all of them, so that a step's diff shows only its idea.

To the letter, with its comments, in the scripts of a group. Where a script has lines of its own,
these are declared.
"""

import ast
import difflib
import re

import pytest
from helpers.jobs import ROOT, SCRIPTS, every_script

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
ONE, FROM_SPAWN, DDP = SCRIPTS[:2], (SPAWN, NODES), SCRIPTS[2:]

# function: its groups, the first script of which the others are compared with
GROUPS = {
    "Trainer._run_batch": [(SINGLE, PARALLEL, SPAWN, NODES)],
    "Trainer._run_epoch": [ONE, FROM_SPAWN],
    "Trainer._evaluate": [ONE, FROM_SPAWN],
    "Trainer.train": [ONE, FROM_SPAWN],
    "Trainer._save_snapshot": [FROM_SPAWN],
    "Trainer._load_snapshot": [(SINGLE, PARALLEL, SPAWN, NODES)],
    "load_train_objs": [SCRIPTS],
    "prepare_dataloader": [SCRIPTS],
    "compare_ranks": [(TORCHRUN, NODES)],
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
# function, two scripts: the lines that only the first (-) or only the second has (+), but their
# comments
BUT_FOR = {
    ("Trainer.__init__", SINGLE, PARALLEL): """\
+ self.model = nn.DataParallel(model)
""",
    ("Trainer.__init__", SPAWN, NODES): """\
+ loaded = {"snapshot's epoch": self.epoch}
+ if any(loaded.values()):
+ loaded["snapshot's last weight"] = [*model.parameters()][-1].flatten()[-1].item()
+ compare_ranks(loaded)
""",
    ("Trainer.__init__", SPAWN, TORCHRUN): """\
+ self.world_size = dist.get_world_size()
+ if args.sync_bn:
+ model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
- self.epoch = 0
+ self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
+ self.epoch = 0
+ self.samples_seen = 0
+ self.unsaved_steps = 0
+ loaded = {"snapshot's epoch": self.epoch, "snapshot's samples_seen": self.samples_seen}
+ if any(loaded.values()):
+ loaded["snapshot's last weight"] = [*model.parameters()][-1].flatten()[-1].item()
+ compare_ranks(loaded)
+ if args.compile:
+ model.compile(dynamic=False)
""",
    ("Trainer._evaluate", SPAWN, TORCHRUN): """\
+ with self.autocast:
""",
    ("Trainer.train", SINGLE, SPAWN): """\
- train_size = len(self.train_data.dataset)
+ train_size = self.train_data.sampler.total_size
""",
    ("Trainer.train", SPAWN, TORCHRUN): """\
- train_size = self.train_data.sampler.total_size
+ train_size = self.train_data.sampler.total_size - self.samples_seen
+ self.samples_seen = 0
""",
    ("Trainer._save_snapshot", SINGLE, PARALLEL): """\
- "model": self.model.state_dict(),
+ "model": self.model.module.state_dict(),
""",
    ("Trainer._save_snapshot", PARALLEL, SPAWN): """\
+ if self.rank > 0:
+ return
""",
    ("Trainer._save_snapshot", SPAWN, TORCHRUN): """\
+ self.unsaved_steps = 0
+ "samples_seen": self.samples_seen,
""",
    ("Trainer._load_snapshot", SPAWN, TORCHRUN): """\
- if snapshot.get("samples_seen"):
- sys.exit(f"error: {path} was saved in mid-epoch: go on with ddp_torchrun.py")
+ seen = snapshot.get("samples_seen", 0)
+ self.samples_seen = seen - seen % self.world_size
""",
}
# The order in which a first reader meets them
ORDER = [
    "ddp_setup",
    "Trainer",
    "load_train_objs",
    "ResumableSampler",
    "prepare_dataloader",
    "main",
]
ORDER += ["compare_ranks", "log", "default_backend", "positive", "parse_args"]


def tree(script: str) -> list[ast.stmt]:
    return ast.parse((ROOT / script).read_text()).body


def lines(script: str, name: str, comments: bool = True) -> list[str]:
    """Of a function, without its indentation."""
    body = tree(script)
    for part in name.split("."):
        (node,) = (node for node in body if getattr(node, "name", "") == part)
        body = node.body
    if not comments:
        return ast.unparse(node).splitlines()
    whole = (ROOT / script).read_text().splitlines()
    return [line.strip() for line in whole[node.lineno - 1 : node.end_lineno]]


@pytest.mark.parametrize(("name", "first", "other"), SAME)
def test_a_function_is_the_same(name, first, other):
    comments = name != "Trainer._run_batch"  # where the gradients travel is another thing in each
    assert lines(first, name, comments) == lines(other, name, comments)


@pytest.mark.parametrize(("name", "first", "other"), BUT_FOR)
def test_a_function_is_the_same_but_for_its_declared_lines(name, first, other):
    found = difflib.ndiff(lines(first, name), lines(other, name))
    found = [line.split("  #")[0] for line in found if line[0] in "-+"]
    assert found == BUT_FOR[name, first, other].splitlines()


@every_script
def test_a_file_has_its_parts_in_the_order_of_the_others(script):
    names = [node.name for node in tree(script) if hasattr(node, "name")]
    assert names == [name for name in ORDER if name in names]
    assert isinstance(tree(script)[-1], ast.If)  # the main guard


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
            assert len(mine) >= 15
            for name in mine.keys() & theirs.keys():
                if mine[name] != theirs[name]:
                    found |= {(name, script), (name, other)} & differ or {(name, script, other)}
            shared = [name for name in mine if name in theirs]
            assert shared == [name for name in theirs if name in mine], (script, other)  # the order
    assert found == differ
