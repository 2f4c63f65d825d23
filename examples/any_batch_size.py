"""Trains with a batch that does not fit the budget: storm.run splits it, and repeats a step that runs out of memory.

python examples/any_batch_size.py [--ram 3MiB] [--batch 64] [--steps 4]
"""

import argparse
import tempfile

import torch
from torch import nn

import torchstorm


def make_model(*, num_layers: int = 4, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(256, width),
        nn.TransformerEncoder(block, num_layers, enable_nested_tensor=False),
        nn.Linear(width, 256),
    )


def train(storm: torchstorm.Session, model: nn.Module, *, batch_size: int, num_steps: int) -> list[float]:
    def fn(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """The sum of the losses of all tokens that are not ignored, and the number of these tokens."""
        logits_BTV = model(batch["ids_BT"])
        losses = nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), batch["labels_BT"].flatten(), ignore_index=-100, reduction="sum"
        )
        return losses, int((batch["labels_BT"] != -100).sum())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(num_steps):
        ids_BT = torch.randint(256, (batch_size, 64), generator=generator)
        padded_BT = torch.arange(64) >= torch.randint(16, 65, (batch_size, 1), generator=generator)
        loss = storm.run(fn, {"ids_BT": ids_BT, "labels_BT": ids_BT.masked_fill(padded_BT, -100)})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with a batch that does not fit the budget.")
    parser.add_argument("--ram", default="3MiB")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    model = make_model()
    with torchstorm.Session(model, unlimited=True) as storm:
        whole = train(storm, model, batch_size=options.batch, num_steps=options.steps)
        print(f"the whole batch at once needs {storm.report().highest.ram_bytes / 2**20:.1f} MiB")
    model = make_model()
    with (
        tempfile.TemporaryDirectory() as directory,
        torchstorm.Session(model, ram=options.ram, disk=directory) as storm,
    ):
        losses = train(storm, model, batch_size=options.batch, num_steps=options.steps)
        print(storm.report())
    agree = all(abs(one - other) < 1e-3 * one for one, other in zip(whole, losses, strict=True))
    print(f"losses equal up to the order of summation: {agree}")


if __name__ == "__main__":
    main()
