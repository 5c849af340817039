"""Write another learning rate into a snapshot, for a run that is resumed with this rate.

Run it with `python docs/recipes/change_lr.py checkpoint.pt 0.001`.
"""

import os
import sys

import torch

path, rate = sys.argv[1], float(sys.argv[2])
snapshot = torch.load(path, map_location="cpu", weights_only=True)
factor = rate / float(snapshot["args"]["lr"])
for group in snapshot["optimizer"]["param_groups"]:
    group["lr"] *= factor
    group["initial_lr"] *= factor
schedule = snapshot["schedule"]
for state in (schedule, *schedule.get("_schedulers", ())):
    if "base_lrs" in state:
        state["base_lrs"] = [base * factor for base in state["base_lrs"]]
snapshot["args"]["lr"] = str(rate)
torch.save(snapshot, f"{path}.tmp")
os.replace(f"{path}.tmp", path)  # never half a file
