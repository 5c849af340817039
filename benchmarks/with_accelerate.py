"""The same training with Accelerate, as its documentation shows it.

    python with_accelerate.py EPOCHS --data-dir DIR
    torchrun --nproc_per_node=2 with_accelerate.py EPOCHS --data-dir DIR

(`accelerate launch` starts several processes on CPUs through MPI only.)
After https://huggingface.co/docs/accelerate/basic_tutorials/migration
"""

import time

import peer
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from common.model import build_model


def main() -> None:
    args = peer.parse_args()
    accelerator = Accelerator(cpu=args.device == "cpu")
    set_seed(args.seed)
    train_set, test_set, collate = peer.load_data(args)
    model = build_model(args.model, (1, 28, 28))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    train_data = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    model, optimizer, train_data = accelerator.prepare(model, optimizer, train_data)

    for epoch in range(args.total_epochs):
        model.train()
        start = time.perf_counter()
        for source, targets in train_data:
            optimizer.zero_grad()
            output = model(peer.normalize(args, source))
            loss = F.cross_entropy(output, targets)
            accelerator.backward(loss)
            optimizer.step()
        if args.device != "cpu":
            torch.accelerator.synchronize()
        rate = len(train_set) / (time.perf_counter() - start)
        if accelerator.is_main_process:
            peer.print_epoch(args, epoch, accelerator.unwrap_model(model), test_set, rate)


if __name__ == "__main__":
    main()
