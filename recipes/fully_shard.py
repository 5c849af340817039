"""docs/your_loop.py with fully_shard in the place of DDP, for a model that fills a device.

    torchrun --nproc_per_node=2 recipes/fully_shard.py

Each rank holds its share of the weights, of the gradients and of the momenta. It has whole layers
one after the other: when it makes the model, and in the forward and backward pass. A snapshot is a
folder to which each rank writes its share, and any number of ranks can resume from it. On several
nodes it must lie on a disk that they share. model.pt has all weights, for inference. Compare with
`git diff --no-index docs/your_loop.py recipes/fully_shard.py`.
"""

import itertools
import math
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(count, seed):
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    targets = (inputs.sum(dim=1) > 0).long()
    return TensorDataset(inputs, targets)


def draw_weights(part, device):
    """As the constructors would have. All ranks draw the same, because they have the same seed."""
    for module in part.modules():
        own = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()  # a layer of your own needs this method


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(42)
    device = torch.device("cpu")
    precision = MixedPrecisionPolicy()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # Compute and gather weights in bfloat16, and add up gradients in float32. The shares of the
        # weights, which the optimizer changes, stay in float32.
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train_set, val_set = make_data(1000, seed=1), make_data(303, seed=2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=64 // world_size, sampler=sampler)
    # Evaluation gathers weights, too. So all ranks need the same number of batches.
    shard = torch.arange(rank, len(val_set), world_size)
    batches = shard.tensor_split(math.ceil(len(val_set) / (100 * world_size)))
    val_loader = DataLoader(val_set, batch_sampler=[batch.tolist() for batch in batches])
    with torch.device("meta"):  # layers without memory for their weights
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    for layer in model:  # of a transformer, its blocks
        draw_weights(layer, device)
        fully_shard(layer, mp_policy=precision)  # of these, each rank keeps its share
    draw_weights(model, device)  # what is left
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # .metadata is written last, so a snapshot that has it is complete.
    saved = [int(path.parent.name[9:]) for path in Path().glob("snapshot-*/.metadata")]
    first_epoch = max(saved, default=0)
    if saved:
        weights, momenta = get_state_dict(model, optimizer)  # this rank's shares
        shares = {"model": weights, "optimizer": momenta}
        dcp.load(shares, checkpoint_id=f"snapshot-{first_epoch}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=shares["model"],
            optim_state_dict=shares["optimizer"],
        )

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
        correct = torch.zeros((), dtype=torch.long, device=device)
        with torch.no_grad():
            for inputs, targets in val_loader:
                inputs, targets = inputs.to(device), targets.to(device)
                correct += (model(inputs).argmax(dim=1) == targets).sum()
        dist.all_reduce(correct)
        weights, momenta = get_state_dict(model, optimizer)  # this rank's shares
        dcp.save({"model": weights, "optimizer": momenta}, checkpoint_id=f"snapshot-{epoch + 1}")
        if rank == 0:
            print(f"epoch {epoch}: {correct} of {len(val_set)} correct")
            shutil.rmtree(f"snapshot-{epoch}", ignore_errors=True)  # the new one is complete

    # All ranks gather the whole weights, and rank 0 gets them, in the memory of its CPU.
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    if rank == 0:
        torch.save(weights, "model.pt")

    # DTensor's caches keep gloo's threads alive, and after a barrier they abort Python less often.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
