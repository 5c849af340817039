"""recipes/fully_shard.py trains as one process does, and no rank has the whole model."""

import json
import re
from pathlib import Path

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
LARGE = """\
@@
-    train_set, val_set = make_data(1000, seed=1), make_data(303, seed=2)
+    train_set, val_set = make_data(192, seed=1), make_data(30, seed=2)
@@
-        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
+        wide = (nn.Linear(1024, 1024) for _ in range(12))
+        model = nn.Sequential(nn.Linear(20, 1024), *wide, nn.Linear(1024, 2))
+    profiler = torch.profiler.profile(profile_memory=True)
+    profiler.start()
@@
-    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
+    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
+    with torch.profiler.record_function("the model is made"):
+        pass
@@
-        model.eval()
+        profiler.stop()
+        profiler.export_chrome_trace(f"trace-{rank}.json")
+        model.eval()
"""


def changed(program: Path, folder: Path, diff: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(patched(program.read_text(), diff))
    return folder / "program.py"


def test_two_ranks_and_then_three_train_as_one_process_does(tmp_path):
    """From the weights that the layers draw where they are made. Three ranks resume from the last
    complete snapshot of two; older ones are removed."""
    program = changed(RECIPE, tmp_path, DIVISIBLE + EPOCHS.format(2))
    text = train(tmp_path, program, 2, dtype="float64")
    assert [path.name for path in tmp_path.glob("snapshot-*")] == ["snapshot-2"]
    (tmp_path / "snapshot-4").mkdir()  # as ranks leave it that are killed while they write
    text += train(tmp_path, changed(RECIPE, tmp_path, DIVISIBLE), 3, dtype="float64")
    one = tmp_path / "one"
    expected = train(one, changed(LOOP, one, DIVISIBLE), 1, dtype="float64")
    printed, expected = (re.findall(r"^epoch .*", each, re.M) for each in (text, expected))
    assert printed == expected and len(printed) == 5
    wanted = load(one / "snapshot.pt")["model"]
    torch.testing.assert_close(load(tmp_path / "model.pt"), wanted, rtol=0, atol=1e-12)


def test_no_rank_ever_holds_the_whole(tmp_path):
    """Of 12 layers: their weights while the model is made, and with gradients and momenta later.
    Besides its share a rank has one layer at a time, which needs several buffers in training."""
    train(tmp_path, changed(RECIPE, tmp_path, LARGE + EPOCHS.format(1)), 2)
    layer, parts = 4 * 1024 * 1025, 12 / 2
    for rank in range(2):
        events = json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        (made,) = (event["ts"] for event in events if event["name"] == "the model is made")
        memory = [(event["ts"], event["args"]) for event in events if event["name"] == "[memory]"]
        live, most = {}, {True: 0, False: 0}
        for time, change in sorted(memory, key=lambda event: event[0]):
            live[change["Addr"]] = max(0, change["Bytes"])
            most[time < made] = max(most[time < made], sum(live.values()))
        assert parts < most[True] / layer < parts + 2, "of 12"
        assert 3 * parts < most[False] / layer < 3 * parts + 10, "of 36"
