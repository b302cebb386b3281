"""The network that every system offloads."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 1024
LAYERS = 16
INFERENCE_BATCH = 64
TRAINING_BATCH = 256


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.fc(self.ln(x)))


class Net(nn.Module):
    """16 blocks of width 1024 and a head: 68.2 MiB of weights."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.layers:
            x = block(x)
        return self.head(x)


def weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def cpu_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of the weights on the CPU, and of a sharded one the local part."""
    state = {}
    for name, value in model.state_dict().items():
        if hasattr(value, "full_tensor"):
            value = value.to_local()
        state[name.removeprefix("module.")] = value.detach().cpu().clone()
    return state


def max_difference(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    if ours.keys() != reference.keys():
        raise ValueError(f"other weights than the reference: {ours.keys() ^ reference.keys()}")
    return max(
        (ours[name].double() - value.double()).abs().max().item()
        for name, value in reference.items()
    )
