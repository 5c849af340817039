"""recipes/fully_shard.py trains as one process does, and each rank holds its share of the model."""

import re
from pathlib import Path

import pytest
import torch
from helpers.files import load, patched
from helpers.jobs import ROOT
from helpers.ranks import train

RECIPE, LOOP = ROOT / "recipes" / "fully_shard.py", ROOT / "docs" / "your_loop.py"
DIVISIBLE = """\
@@ of both programs: each epoch is 16 global batches, for two ranks and for three
-    train_set, val_set = make_data(1000, seed=1), make_data(303, seed=2)
+    train_set, val_set = make_data(16 * 66, seed=1), make_data(303, seed=2)
@@
-    train_loader = DataLoader(train_set, batch_size=64 // world_size, sampler=sampler)
+    train_loader = DataLoader(train_set, batch_size=66 // world_size, sampler=sampler)
"""
EPOCHS = "@@\n-    for epoch in range(first_epoch, 5):\n+    for epoch in range(first_epoch, {}):\n"
SHARE = """\
@@
     optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
+    print("holds", sum(weights.to_local().numel() for weights in model.parameters()))
"""


def changed(program: Path, folder: Path, diff: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(patched(program.read_text(), diff))
    return folder / "program.py"


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="torch before 2.7")
def test_two_ranks_and_then_three_train_as_one_process_does(tmp_path):
    """Three ranks resume from the last complete snapshot of two. Older ones are removed."""
    program = changed(RECIPE, tmp_path, DIVISIBLE + SHARE + EPOCHS.format(2))
    text = train(tmp_path, program, 2, dtype="float64")
    assert text.count("holds 737\n") == 2  # of 1,474 weights
    assert [path.name for path in tmp_path.glob("snapshot-*")] == ["snapshot-2"]
    (tmp_path / "snapshot-4").mkdir()  # as ranks leave it that are killed while they write
    text += train(tmp_path, changed(RECIPE, tmp_path, DIVISIBLE), 3, dtype="float64")
    one = changed(LOOP, tmp_path / "one", DIVISIBLE)
    expected = train(one.parent, one, 1, dtype="float64")
    printed, expected = (re.findall(r"^epoch .*", each, re.M) for each in (text, expected))
    assert printed == expected and len(printed) == 5
    model, wanted = load(tmp_path / "model.pt"), load(one.with_name("snapshot.pt"))["model"]
    torch.testing.assert_close(model, wanted, rtol=0, atol=1e-12)
