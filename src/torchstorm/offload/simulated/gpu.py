"""A GPU that is not here: runs PyTorch's operations on meta tensors, and counts the bytes and seconds they would take.

Memory is counted as PyTorch's caching allocator does: storages, rounded up to 512 bytes, from the operation that makes
one until its last tensor is gone. Since the program is the real one, so is the order in which memory comes and goes.
Time runs on two clocks, the host's, which queues an operation after another, and the device's, which computes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchstorm.errors import UnsupportedError
from torchstorm.offload.simulated.known_values import KnownNumbers
from torchstorm.offload.simulated.roofline import op_seconds, scratch_bytes
from torchstorm.plan.machine import Machine

META = torch.device("meta")
_ROUND = 512
_VIEW_SHARE = 0.3  # of an operation's time on the host: a view launches nothing


class SimulatedGPU(TorchDispatchMode):
    """Active while a simulated step runs.

    Args:
        machine: rates of the GPU.
        freed: told the address of every storage when it is gone; says whether its bytes still count.

    Attributes:
        live_bytes: what the user's program holds now.
        peak_bytes: the most of it since `reset_peak`.
    """

    def __init__(self, machine: Machine, *, freed: Callable[[int], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.scratch_bytes = 0  # of the latest operation
        self._machine = machine
        self._freed = freed
        self._device_s = 0.0
        self._host_s = 0.0
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # by a storage's address
        self._aside = False
        self._numbers = KnownNumbers()

    def now(self) -> float:
        """Seconds at which the device will have come to where the host is."""
        return max(self._device_s, self._host_s)

    def wait_host(self, seconds: float) -> None:
        """The host is busy with something else."""
        self._host_s += seconds

    def reset_peak(self) -> None:
        """Counts the peak from here."""
        self.peak_bytes = self.live_bytes

    def release(self, nbytes: int) -> None:
        """Bytes of a storage that was gone already count no longer."""
        self.live_bytes -= nbytes

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens within is not the step's."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def hold(self, tensor: torch.Tensor, original: torch.Tensor | None = None) -> None:
        """Counts a tensor from now on; `original` has its numbers, where it has any."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live or not storage.nbytes():
            return
        nbytes = -(-storage.nbytes() // _ROUND) * _ROUND
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

        def gone(_: object) -> None:
            self._numbers.forget(address)
            if self._live.pop(address, None) is not None and not self._freed(address):
                self.live_bytes -= nbytes

        self._live[address] = (weakref.ref(storage, gone), nbytes)
        if original is not None and not original.is_meta:
            self._numbers.learn(tensor, original)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._aside:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        if device is not None and (torch.device(device).type == "cuda" or any(tensor.is_meta for tensor in tensors)):
            kwargs["device"] = META
        if kwargs.get("device") != META and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)  # the host's own numbers
        kwargs.pop("pin_memory", None)
        if any(not tensor.is_meta and tensor.dim() for tensor in tensors):
            args, kwargs = tree_map(_to_meta, (args, kwargs))
            tensors = [_to_meta(tensor) for tensor in tensors]
        if func._schema.name == "aten::_local_scalar_dense":
            known = self._numbers.of(args[0])
            if known is not None:
                return known.item()
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
                raise
            host = self._numbers.compute(func, args, kwargs, tensors)
            if host is None:
                raise _unknown(func, error) from error
            out = tree_map(_to_meta, host)  # its shape depends on numbers, and they are known
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not made:
            return out
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        new = [tensor for tensor in made if tensor.untyped_storage()._cdata not in given]
        written = made if func._schema.is_mutable and not new else []
        if not new and not written:
            self._host_s += self._machine.launch_s * _VIEW_SHARE
            self.scratch_bytes = 0
            return out
        for tensor in new:
            self.hold(tensor)
        self.scratch_bytes = scratch_bytes(func, tensors)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + self.scratch_bytes)
        self._host_s += self._machine.launch_s
        if "empty" not in func._schema.name:
            seconds = op_seconds(self._machine, func, args, out, inputs=tensors, outputs=new or written)
            self._device_s = max(self._device_s, self._host_s) + seconds
        self._numbers.follow(func, args, kwargs, tensors, new, written)
        return out


def _to_meta(item: Any) -> Any:
    """A tensor of the host's as the GPU would get it; a single number may stay."""
    if isinstance(item, torch.Tensor) and not item.is_meta and item.dim():
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=META)
    return item


def _unknown(func: Any, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"{func} cannot be forecast for a machine that is not here: what it gives depends on numbers, and the forecast "
        f"has only shapes ({str(error).splitlines()[0] if str(error) else type(error).__name__}). Make the plan on "
        "that machine, without machine=, or leave such code (logging, .item(), nonzero) out of loss_fn."
    )
