"""Trains an nn.Module within a memory budget: here a small transformer, with disk as the tier below RAM.

The model does not depend on torchstorm. On a GPU, move the model there and pass vram=, too.

    python examples/offload_any_model.py [--ram 4MiB] [--disk DIR] [--steps 5]
"""

import argparse
import tempfile

import torch
from torch import nn

import torchstorm


def make_model(*, num_layers: int = 4, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.Embedding(256, width),
        nn.TransformerEncoder(block, num_layers, enable_nested_tensor=False),
        nn.Linear(width, 256),
    )


def train(model: nn.Module, storm: torchstorm.Session, *, num_steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(num_steps):
        ids_BT = torch.randint(256, (8, 64), generator=generator)
        with storm.step():
            logits_BTV = model(ids_BT)
            loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small transformer within a memory budget.")
    parser.add_argument("--ram", default="4MiB")
    parser.add_argument("--disk", help="a directory for spill files; left out: a temporary one")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = make_model()
        with torchstorm.Session(model, unlimited=True) as storm:
            expected = train(model, storm, num_steps=options.steps)
            unlimited_bytes = storm.report().measured.ram_bytes
        model = make_model()
        with torchstorm.Session(model, ram=options.ram, disk=options.disk or temporary) as storm:
            losses = train(model, storm, num_steps=options.steps)
            report = storm.report()
        print(report)
        print(f"saved tensors: {unlimited_bytes / 2**20:.1f} MiB without a budget, ", end="")
        print(f"{report.measured.ram_bytes / 2**20:.1f} MiB with it")
        print(f"losses bit-identical: {losses == expected}")


if __name__ == "__main__":
    main()
