"""docs/your_loop.py on a stream: files that are read in order, with an unknown number of samples.

    torchrun --nproc_per_node=2 recipes/stream.py

Each rank reads files of its own, so some ranks come to the end before others. All ranks take part
in each step until the last one has come to its end. The first run writes five small files.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def write_files(folder):
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    for number, count in enumerate((300, 120, 250, 90, 240)):
        inputs = torch.randn(count, 20, generator=generator)
        targets = (inputs.sum(dim=1) > 0).long()
        torch.save((inputs, targets), folder / f"{number}.pt")


class Stream(IterableDataset):
    """The samples of every n-th file, where n is the number of all workers of all ranks."""

    def __init__(self, files, rank, world_size):
        self.files, self.rank, self.world_size = files, rank, world_size
        self.epoch = 0

    def __iter__(self):
        worker = get_worker_info()  # None where the rank itself reads
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.files), generator=generator)  # the same everywhere
        for index in order[self.rank * count + number :: self.world_size * count].tolist():
            yield from zip(*torch.load(self.files[index]), strict=True)


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(42)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if rank == 0 and not os.path.exists("stream"):
        write_files(Path("stream"))
    dist.barrier()
    train_set = Stream(sorted(Path("stream").glob("*.pt")), rank, world_size)
    # Without persistent workers: each epoch's get a copy of the data set, and so its new epoch.
    train_loader = DataLoader(train_set, batch_size=64 // world_size)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(5):
        model.train()
        train_set.epoch = epoch
        samples, correct = torch.zeros(2, device=device)
        batches = iter(train_loader)
        # A rank without any file has this sample, and gives it no weight.
        inputs, targets = torch.zeros(1, 20, device=device), torch.zeros(1, device=device).long()
        while True:
            batch = next(batches, None)
            if batch:
                inputs, targets = (tensor.to(device) for tensor in batch)
            own = len(targets) if batch else 0
            count = torch.tensor(own, device=device)
            dist.all_reduce(count)
            if count == 0:  # all ranks have come to the end
                break
            # The mean over the global batch. At its end a rank takes its last batch again, without
            # weight, because the all-reduce in backward() needs all ranks.
            output = model(inputs)
            loss = F.cross_entropy(output, targets, reduction="sum") * world_size / count
            optimizer.zero_grad()
            (loss * bool(own)).backward()
            optimizer.step()
            samples += own
            correct += (output.argmax(dim=1) == targets).sum() * bool(own)
        sums = torch.stack((samples, correct))
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: {sums[1]:.0f} of {sums[0]:.0f} correct")
            torch.save(model.module.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(), because the DDP object must be freed first
