"""The output layer of a language model fused with its loss, as all models here use it with targets."""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.kernels import linear_cross_entropy

_AUTOCAST_OF = {"meta": ("cuda", "cpu")}
"""Device types whose autocast state applies to tensors on "meta": a forecast may be for either of them."""


def next_token_loss(x_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor, *, softcap: float = 0.0) -> Tensor:
    """The mean cross-entropy in nats of the logits x W^T. Large ones are computed in parts and not saved.

    Args:
        x_BTC: input of the head.
        head_VC: weight of the head. Autocast casts both as for a linear layer.
        targets_BT: int64 ids, -100 to ignore a position.
        softcap: logits become softcap * tanh(logits / softcap); 0 for no softcap.
    """
    kind = x_BTC.device.type
    for device in _AUTOCAST_OF.get(kind, (kind,)):
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x_BTC, head_VC = x_BTC.to(dtype), head_VC.to(dtype)
            break
    return linear_cross_entropy(x_BTC, head_VC, targets_BT, softcap=softcap or None)
