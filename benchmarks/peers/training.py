"""Systems that train: `trainer` returns a step, from an input and a target to the loss."""

import contextlib
import logging
import os
from collections.abc import Callable

import torch
from inference import DEVICE, shard
from models import TRAINING_BATCH, WIDTH, cpu_state
from torch import nn
from torch.nn import functional as F

LEARNING_RATE = 1e-3

SYSTEMS = [
    "plain",
    "checkpoint",
    "save_on_cpu_pinned",
    "save_on_cpu_pageable",
    "fsdp",
    "fsdp_offload",
    "fsdp_offload_pageable",
    "torchao",
    "torchao_gradients",
    "deepspeed_zero2",
    "deepspeed_zero3",
]

Step = Callable[..., torch.Tensor]


def trainer(system: str, model: nn.Module) -> Step:
    """Returns one step of AdamW on the mean square error. "cpu" is the reference.

    A step takes an input, a target and, but for DeepSpeed, whether to update the weights.
    """
    if system.startswith("deepspeed"):
        return _deepspeed(system, model)
    if system.startswith("fsdp"):
        shard(model, offload="offload" in system, pin_memory=system == "fsdp_offload")
    elif system != "cpu":
        model.to(DEVICE)
    if system == "checkpoint":
        _checkpoint(model)

    if system.startswith("torchao"):
        from torchao.optim import CPUOffloadOptimizer

        optimizer = CPUOffloadOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            offload_gradients=system == "torchao_gradients",
            lr=LEARNING_RATE,
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def saving():
        if system.startswith("save_on_cpu"):
            return torch.autograd.graph.save_on_cpu(pin_memory=system == "save_on_cpu_pinned")
        return contextlib.nullcontext()

    def step(x, target, update=True):
        with saving():
            loss = F.mse_loss(model(x), target)
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def _checkpoint(model: nn.Module) -> None:
    from torch.utils.checkpoint import checkpoint

    for block in model.layers:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


def _deepspeed(system: str, model: nn.Module) -> Step:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    os.environ["DS_SKIP_CUDA_CHECK"] = "1"
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    # The defaults of the buckets are for models of billions: 2 GiB of peak for 68 MiB of weights.
    zero = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 4 * WIDTH * WIDTH,
    }
    if system == "deepspeed_zero3":
        zero |= {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 4 * WIDTH * WIDTH,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
        }
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": TRAINING_BATCH,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # 1.0 by default, which no other system here does
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
            "zero_optimization": zero,
        },
    )

    def step(x, target):
        loss = F.mse_loss(engine(x), target)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def weights(system: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the trained weights, on the CPU."""
    if system == "deepspeed_zero3":
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return cpu_state(model)
    return cpu_state(model)
