import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def make_data(count, seed):
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    targets = (inputs.sum(dim=1) > 0).long()
    return TensorDataset(inputs, targets)


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(42)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train_set, val_set = make_data(1000, seed=1), make_data(303, seed=2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=64 // world_size, sampler=sampler)
    val_shard = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_shard, batch_size=100)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first_epoch, objects = 0, [None]
    if rank == 0 and os.path.exists("snapshot.pt"):
        objects = [torch.load("snapshot.pt", map_location="cpu")]
    dist.broadcast_object_list(objects)  # all ranks resume from rank 0's snapshot
    if snapshot := objects[0]:
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first_epoch = snapshot["epoch"]
    model = DDP(model)  # needs no device_ids, because the loop moves the inputs itself
    for epoch in range(first_epoch, 5):
        model.train()
        sampler.set_epoch(epoch)  # a new order in each epoch, the same in each run
        torch.manual_seed(1000 * epoch + rank)  # otherwise dropout would be the same on all ranks
        for inputs, targets in train_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        for buffer in model.buffers():  # all ranks use rank 0's BatchNorm statistics
            dist.broadcast(buffer, src=0)
        correct = torch.zeros((), dtype=torch.long, device=device)
        with torch.no_grad():
            for inputs, targets in val_loader:
                inputs, targets = inputs.to(device), targets.to(device)
                correct += (model.module(inputs).argmax(dim=1) == targets).sum()
        dist.all_reduce(correct)
        if rank == 0:
            print(f"epoch {epoch}: {correct} of {len(val_set)} correct")
            snapshot = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**snapshot, "epoch": epoch + 1}, "snapshot.pt.tmp")
            os.replace("snapshot.pt.tmp", "snapshot.pt")  # a crash leaves the old or the new one


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(), because the DDP object must be freed first
