"""The implementations of the mLSTM to compare: development steps, the forms in PyTorch, and a peer."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchstorm.bench.mlstm_cases import Inputs, MLSTMCase
from torchstorm.kernels.ladders import variants
from torchstorm.kernels.mlstm import mlstm
from torchstorm.kernels.mlstm.ladder import mlstm_ladder

PEER = "mlstm_kernels"
_PEER_KERNEL = "chunkwise--triton_xl_chunk"
_PEER_CHUNK = 128
_WORK = {"matmul_tiles": "product", "qk_v": "pairs", "recurrent": "recurrent", "chunkwise": "chunkwise"}
# Slower implementations are left out, estimated with low rates of such kernels on an H200.
_MOST_SECONDS = 0.6
_MOST_BYTES = 48 * 2**30
_FLOPS = {"cores": 6e12, "tensor cores": 100e12}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One implementation.

    Attributes:
        name: name of the variant, the development step, or the peer's kernel.
        function: function of the inputs named in `inputs`.
        reference: the same function in plain PyTorch; None for the whole mLSTM.
        work: kind of work for `MLSTMCase.flops`.
        has_backward: whether it is differentiable.
        is_ours: whether it is our code. Others run in a separate process, since a peer's kernel can crash the compiler.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[str, ...] = ("q", "k", "v", "i", "f")
    reference: Callable[..., Tensor] | None = None
    work: str = "causal"
    has_backward: bool = True
    is_ours: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether it computes the whole mLSTM, not an intermediate step."""
        return "f" in self.inputs

    def given(self, inputs: Inputs) -> list[Tensor]:
        """The inputs of this implementation."""
        return [inputs["k"].mT if name == "k_t" else inputs[name] for name in self.inputs]

    def why_not(self, case: MLSTMCase, dtype: torch.dtype) -> str:
        """Why it is left out at this shape on a GPU; "" if it is not."""
        if self.work in ("chunkwise", "recurrent"):
            return ""
        needs = case.least_bytes(self.work, dtype, backward=False)
        if needs > _MOST_BYTES:
            return f"left out: it needs {needs / 2**30:.0f} GiB, as it stores S x S"
        is_fast = "tensor-cores" in self.name and dtype != torch.float32
        seconds = case.flops(self.work, backward=self.has_backward) / _FLOPS["tensor cores" if is_fast else "cores"]
        if seconds > _MOST_SECONDS:
            return f"left out: it would take some {seconds:.1f} s a time"
        return ""


def ways_for(device: torch.device) -> tuple[Way, ...]:
    """The implementations for a device in historical order, with the peer last."""
    if device.type == "cpu":
        names = [name for name in variants("mlstm") if not name.startswith("triton")]
        return tuple(
            Way(name=name, function=partial(mlstm, variant=name), work=_WORK.get(name, "causal")) for name in names
        )
    ladder = tuple(
        Way(
            name=rung.name,
            function=rung.function,
            inputs=rung.inputs,
            reference=None if rung.has_backward else rung.reference,
            work="chunkwise" if rung.name.endswith("chunkwise") else _WORK.get(rung.name, "causal"),
            has_backward=rung.has_backward,
        )
        for rung in mlstm_ladder()
    )
    return (*ladder, *peers())


def peers() -> tuple[Way, ...]:
    """Implementations of other packages, if installed."""
    if importlib.util.find_spec(PEER) is None:
        return ()

    def compute(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        kernel: Any = importlib.import_module(f"{PEER}.torch").get_mlstm_kernel(_PEER_KERNEL)
        # With gates in bfloat16, its kernels crash Triton 3.6's compiler.
        found: Any = kernel(q=q, k=k, v=v, i=i.float(), f=f.float(), chunk_size=_PEER_CHUNK)
        h: Tensor = found[0] if isinstance(found, tuple) else found
        return h

    return (Way(name=PEER, function=compute, work="chunkwise", is_ours=False),)
