"""The last layer of a language model together with its loss: what every one does where targets are given."""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.kernels import linear_cross_entropy

_AUTOCAST_OF = {"meta": ("cuda", "cpu")}
"""Types of devices whose autocast counts, where that is not the tensor's own: in a forecast either may be meant."""


def next_token_loss(x_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor, *, softcap: float = 0.0) -> Tensor:
    """The mean cross-entropy in nats of logits x W^T, which are not kept and, where they are many, never there at once.

    Args:
        x_BTC: what the head is given.
        head_VC: its weight; both are cast as autocast casts what a linear layer is given.
        targets_BT: int64 ids, -100 where none counts.
        softcap: logits become softcap * tanh(logits / softcap); 0 leaves them.
    """
    kind = x_BTC.device.type
    for device in _AUTOCAST_OF.get(kind, (kind,)):
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x_BTC, head_VC = x_BTC.to(dtype), head_VC.to(dtype)
            break
    return linear_cross_entropy(x_BTC, head_VC, targets_BT, softcap=softcap or None)
