"""A convolutional network on scikit-learn's digits; it knows nothing of this project.

python -m torch_residency.sim examples/digits_cnn.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
    loader = torch.utils.data.DataLoader(
        data, batch_size=128, shuffle=True, pin_memory=options.device == "cuda"
    )
    model = Net().to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    step = 0
    while step < options.steps:
        for batch, labels in loader:
            batch = batch.to(options.device, non_blocking=True)
            labels = labels.to(options.device, non_blocking=True)
            loss = F.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.7f}")
            step += 1
            if step == options.steps:
                break

    model.eval()
    with torch.no_grad():
        guesses = model(images.to(options.device)).argmax(1).cpu()
    print(f"accuracy {(guesses == torch.tensor(digits.target)).float().mean().item():.3f}")


if __name__ == "__main__":
    main()
