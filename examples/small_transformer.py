"""A small transformer that learns to copy a sequence backwards; it knows nothing of this project.

python -m torch_residency.sim examples/small_transformer.py
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

WORDS, LENGTH, WIDTH = 32, 24, 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text):
        return self.head(self.encoder(self.words(text) + self.places))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)

    model = Model().to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        text = torch.randint(WORDS, (64, LENGTH)).to(options.device)
        loss = F.cross_entropy(model(text).flatten(0, 1), text.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {loss.item():.7f}")


if __name__ == "__main__":
    main()
