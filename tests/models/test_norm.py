"""models/norm.py: PyTorch's LayerNorm to the bit where no kernel is taken."""

import torch
from torch import nn

from torchstorm.models.norm import LayerNorm


def test_as_pytorch_s_with_its_names() -> None:
    ours, theirs = LayerNorm(24), nn.LayerNorm(24)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 24)
    assert torch.equal(ours(x), theirs(x))
