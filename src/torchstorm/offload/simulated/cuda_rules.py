"""What PyTorch does on CUDA and not on meta tensors: autocast, fused attention, dropout and RMSNorm.

Meta tensors have shapes and no device of their own, so that PyTorch gives them the plain ways: attention with the whole
matrix of weights, dropout with a mask as large as its input, no autocast. What a GPU would do instead decides how much
is saved for backward.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)
_FLASH_WIDTH = 256  # widest head that the flash kernels take

# The lists in ATen/autocast_mode.h, by the names under which Python calls them; operators of no weight left out.
_LOWER = frozenset(
    {
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "prelu",
        "addmm",
        "addmv",
    }
    | {"addr", "matmul", "__matmul__", "__rmatmul__", "einsum", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm"}
    | {"linalg_vecdot", "chain_matmul", "scaled_dot_product_attention", "lstm_cell", "gru_cell", "rnn_tanh_cell"}
)
_FLOAT32 = frozenset(
    {"acos", "asin", "cosh", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan"}
    | {"pow", "__pow__", "__rpow__", "softplus", "layer_norm", "rms_norm", "group_norm", "cosine_similarity"}
    | {"nll_loss", "nll_loss_nd", "cross_entropy_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"}
    | {"binary_cross_entropy_with_logits", "soft_margin_loss", "cosine_embedding_loss", "margin_ranking_loss"}
    | {"triplet_margin_loss", "dist", "cdist", "logsumexp", "norm", "prod", "softmax", "log_softmax", "cumprod"}
    | {"cumsum", "sum", "vector_norm", "linalg_vector_norm"}
)
# Checkpointing runs forward again within them.
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class CudaRules(TorchFunctionMode):
    """Active while a simulated step runs."""

    def __init__(self) -> None:
        super().__init__()
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # weights, as autocast keeps them

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, types.FunctionType) and (_is_functional(func) or func in _BACKWARD):
            with self:  # what it calls has rules of its own
                return _body(func)(*args, **kwargs)
        name = getattr(func, "__name__", "")
        dtype = _autocast_dtype()
        if dtype is None:
            self._casts.clear()
        elif name in _LOWER:
            args, kwargs = self._cast((args, kwargs), dtype)
        elif name in _FLOAT32:
            args, kwargs = self._cast((args, kwargs), torch.float32)
        fused = _FUSED.get(name)
        if fused is not None:
            found = fused(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def _cast(self, given: Any, dtype: torch.dtype) -> Any:
        """Casts floating tensors among arguments. A weight is cast once within an autocast region, and kept."""
        if isinstance(given, torch.Tensor):
            if not given.is_floating_point() or given.dtype in (dtype, torch.float64) or not given.is_meta:
                return given
            is_weight = given.is_leaf and given.requires_grad and given.dtype == torch.float32
            if not is_weight:
                return given.to(dtype)
            if id(given) not in self._casts:
                self._casts[id(given)] = (given, given.to(dtype))
            return self._casts[id(given)][1]
        if isinstance(given, dict):
            return {name: self._cast(item, dtype) for name, item in given.items()}
        if type(given) in (list, tuple):
            return type(given)(self._cast(item, dtype) for item in given)
        return given


@contextlib.contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Lets `torch.autocast("cuda")` be entered where there is no GPU; without this it warns and does nothing."""
    with contextlib.ExitStack() as stack:
        for owner, name, answer in (
            (torch.cuda.amp.common, "amp_definitely_not_available", False),
            (torch.cuda, "is_bf16_supported", True),
        ):
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, lambda *_, answer=answer, **__: answer))
        yield


def _autocast_dtype() -> torch.dtype | None:
    """What autocast asks for, whichever device the user's code names: it was written for the machine that is here."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _is_functional(func: types.FunctionType) -> bool:
    """Whether it is one of `torch.nn.functional`, and not a switch between two others."""
    return func.__module__ == F.__name__ and func.__closure__ is None


def _body(func: types.FunctionType) -> Callable[..., Any]:
    """A function of `torch.nn.functional` that does not ask the mode again, only in what it calls."""
    unasked = {name: lambda *_: False for name in _CHECKS}
    again = types.FunctionType(
        func.__code__, {**func.__globals__, **unasked}, func.__name__, func.__defaults__, func.__closure__
    )
    again.__kwdefaults__ = func.__kwdefaults__
    return again


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """The kernel that a GPU would take: flash for half precision without a mask, else the memory-efficient one."""
    if query.dim() != 4 or not query.is_meta:
        return None
    width = query.shape[-1]
    if attn_mask is None and query.dtype in _HALF and width <= _FLASH_WIDTH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        found: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return found
    if enable_gqa and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    found = efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]
    return found


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor | None:
    """Fused on CUDA: the mask is one byte an element."""
    if not input.is_meta or not training or not 0 < p < 1 or not input.numel():
        return None
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor | None:
    """One kernel on CUDA, which saves its input and one number a row: LayerNorm's without the mean."""
    if not input.is_meta:
        return None
    if weight is not None and weight.dtype != input.dtype:
        weight = weight.to(input.dtype)
    return torch.native_layer_norm(input, list(normalized_shape), weight, None, eps or 1e-6)[0]


_FUSED: dict[str, Callable[..., torch.Tensor | None]] = {
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "rms_norm": _rms_norm,
}
