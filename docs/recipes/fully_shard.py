"""docs/your_loop.py with fully_shard in the place of DDP, for a model that fills a device.

    torchrun --nproc_per_node=2 docs/recipes/fully_shard.py

Each rank holds its share of the weights, of the gradients and of the momenta. In the forward and
backward pass it gathers the weights of one layer at a time. Compare with
`git diff --no-index docs/your_loop.py docs/recipes/fully_shard.py`.
"""

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(count, seed):
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    targets = (inputs.sum(dim=1) > 0).long()
    return TensorDataset(inputs, targets)


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(42)
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
train_set, test_set = make_data(1000, seed=1), make_data(303, seed=2)
sampler = DistributedSampler(train_set)
train_loader = DataLoader(train_set, batch_size=64 // world_size, sampler=sampler)
# Evaluation gathers weights, too. So all ranks need the same number of batches.
shard = torch.arange(rank, len(test_set), world_size)
batches = shard.tensor_split(math.ceil(len(test_set) / (100 * world_size)))
test_loader = DataLoader(test_set, batch_sampler=[batch.tolist() for batch in batches])
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
for layer in model:  # of a transformer, its blocks
    fully_shard(layer)
fully_shard(model)  # what is left
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first_epoch = 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt", map_location="cpu")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=snapshot["model"],
        optim_state_dict=snapshot["optimizer"],
        options=StateDictOptions(full_state_dict=True),  # each rank takes its share of it
    )
    first_epoch = snapshot["epoch"]

for epoch in range(first_epoch, 5):
    model.train()
    sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
    for inputs, targets in train_loader:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    correct = torch.zeros((), device=device)
    with torch.no_grad():
        for inputs, targets in test_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            correct += (model(inputs).argmax(dim=1) == targets).sum()
    dist.all_reduce(correct)
    # All ranks gather the whole state, and rank 0 gets it, in the memory of its CPU.
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, momenta = get_state_dict(model, optimizer, options=whole)
    if rank == 0:
        print(f"epoch {epoch}: {correct:.0f} of {len(test_set)}")
        snapshot = {"model": weights, "optimizer": momenta}
        torch.save({**snapshot, "epoch": epoch + 1}, "snapshot.pt.tmp")
        os.replace("snapshot.pt.tmp", "snapshot.pt")  # the new one whole, or the old one

dist.barrier()  # DTensor's caches keep gloo's threads, which abort Python's end less often then
dist.destroy_process_group()
