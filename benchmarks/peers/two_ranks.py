"""FSDP2 with CPUOffloadPolicy over two ranks and gloo: weights after training against one rank's.

python -m torch_residency.sim --devices 2 --memory 4GiB two_ranks.py RESULT
"""

import copy
import json
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from inference import shard
from models import WIDTH, Net, cpu_state, max_difference
from torch.nn import functional as F

STEPS = 3
BATCH = 32


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(2 * BATCH, WIDTH), torch.randn(2 * BATCH, WIDTH)) for _ in range(STEPS)]


def train(model, own_batches) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, target in own_batches:
        F.mse_loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()


def work(rank: int, port: int, result_file: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    train(reference, batches())
    shard(model, offload=True, pin_memory=True)
    own = slice(rank * BATCH, (rank + 1) * BATCH)
    train(model, [(x[own].cuda(), t[own].cuda()) for x, t in batches()])
    full = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    if rank == 0:
        difference = max_difference(full, cpu_state(reference))
        Path(result_file).write_text(json.dumps({"difference": difference}))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, args=(free_port, sys.argv[1]), nprocs=2)
