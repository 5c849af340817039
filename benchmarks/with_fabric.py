"""The same training with Lightning Fabric, as its documentation shows it.

    python with_fabric.py EPOCHS --data-dir DIR --nproc-per-node 2      Fabric starts the processes

After https://lightning.ai/docs/fabric/stable/fundamentals/convert.html
"""

import time

import peer
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader

from common.model import build_model


def main() -> None:
    args = peer.parse_args()
    strategy = "ddp" if args.nproc_per_node > 1 else "auto"
    fabric = Fabric(accelerator=args.device, devices=args.nproc_per_node, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(args.seed, verbose=False)
    train_set, test_set, collate = peer.load_data(args)
    model = build_model(args.model, (1, 28, 28))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    model, optimizer = fabric.setup(model, optimizer)
    train_data = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    train_data = fabric.setup_dataloaders(train_data)

    for epoch in range(args.total_epochs):
        model.train()
        start = time.perf_counter()
        for source, targets in train_data:
            optimizer.zero_grad()
            output = model(peer.normalize(args, source))
            loss = F.cross_entropy(output, targets)
            fabric.backward(loss)
            optimizer.step()
        if args.device != "cpu":
            torch.accelerator.synchronize()
        rate = len(train_set) / (time.perf_counter() - start)
        if fabric.is_global_zero:
            peer.print_epoch(args, epoch, model.module, test_set, rate)


if __name__ == "__main__":
    main()
