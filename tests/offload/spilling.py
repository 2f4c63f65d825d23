"""Trains a small model, with a Session that moves tensors to a directory or without one.

    python spilling.py DIRECTORY SEED

With a Session, some steps wait for a line on standard input while their tensors lie on the disk.
"""

from __future__ import annotations

import hashlib
import sys

import torch

from torchstorm.offload.session import Session
from torchstorm.plan import search


def train(seed: int, directory: str | None = None) -> str:
    """A digest of the gradients of all steps."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())))
    session = Session(model, ram="1.5MiB", disk=directory, recompute=False, check=True) if directory else None
    digest = hashlib.sha256()
    for index in range(12):
        x = torch.randn(2048, 64)
        if session is not None:
            with session.step():
                loss = model(x).square().mean()
                if index in (3, 6, 9):  # each side waits with its tensors on the disk for the other
                    print("ready", flush=True)
                    sys.stdin.readline()
                loss.backward()
            assert session.usage().disk_bytes > 0
        else:
            model(x).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            digest.update(parameter.grad.numpy().tobytes())
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    return digest.hexdigest()


if __name__ == "__main__":
    search._STEPS = 2  # as `short_search` has it, for another process
    print(train(int(sys.argv[2]), sys.argv[1]), flush=True)
