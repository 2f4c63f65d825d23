"""What a run may change, as it was before: so that a repeat finds it so, and the caller after an error."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch

from torchstorm.errors import UnsupportedError

# Smaller buffers (statistics, counters) are copied on the device. Larger ones (masks, tables) hardly ever change: they
# are copied to the host until it is known that they do not.
_SMALL_BYTES = 2**20


class RandomStates:
    """The states of torch's generators, of the host and of one device, and of numpy's and Python's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._host = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Puts them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._host)
        if self._on_device is not None:  # pragma: gpu
            torch.cuda.set_rng_state(self._on_device, self._device)


class Snapshot:
    """Gradients, buffers and random states at one moment.

    The gradients are set aside: there are none from now on, and what a step makes is added to them at the end.

    Args:
        model: whose buffers and weights to look after.
        trained: the tensors whose gradients may change, with their names.
        batch: tensors that must not change.
        device: the fast device.
        unchanging: names of large buffers that no run has changed so far; those are not copied.
        on_host: whether gradients are set aside in host memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: Iterable[tuple[str, torch.Tensor]],
        batch: Iterable[torch.Tensor],
        device: torch.device,
        *,
        unchanging: set[str],
        on_host: bool,
    ) -> None:
        self._random = RandomStates(device)
        fixed = [*model.named_parameters(), *(("a tensor of the batch", tensor) for tensor in batch)]
        self._fixed = [(name, tensor, tensor._version) for name, tensor in fixed if not tensor.is_inference()]
        self._buffers = [
            (f"{path}.{name}" if path else name, module, name, buffer, buffer._version)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._copies = {
            full: buffer.detach().clone() if buffer.nbytes < _SMALL_BYTES else buffer.detach().to("cpu", copy=True)
            for full, module, _, buffer, _ in self._buffers
            # The statistics of a norm change without a new version.
            if full not in unchanging or isinstance(module, torch.nn.modules.batchnorm._NormBase)
        }
        self._gradients = [(tensor, tensor.grad) for _, tensor in trained]
        for tensor, _ in self._gradients:
            tensor.grad = None
        if on_host:  # pragma: gpu
            self.move_to_host()

    @property
    def had_gradients(self) -> bool:  # pragma: gpu
        """Whether there were any."""
        return any(gradient is not None for _, gradient in self._gradients)

    def move_to_host(self) -> None:  # pragma: gpu
        """Sets gradients aside in host memory, which gives their room on the device back."""
        self._gradients = [
            (tensor, None if gradient is None else gradient.to("cpu")) for tensor, gradient in self._gradients
        ]

    def rewind(self) -> None:
        """Makes all as it was, but for the gradients: there are none.

        Raises:
            UnsupportedError: weights, the batch, or a large buffer of which there is no copy were changed meanwhile.
        """
        for tensor, _ in self._gradients:
            tensor.grad = None
        changed = [name for name, tensor, version in self._fixed if tensor._version != version]
        changed += self._put_buffers_back()
        self._random.restore()
        if changed:
            raise UnsupportedError(
                f"This step cannot be repeated: {changed[0]!r} and {len(changed) - 1} more weights, large buffers or "
                "tensors of the batch were changed within it, and there is no copy of what they were. Change them "
                "outside of storm.run."
            )

    def _put_buffers_back(self) -> list[str]:
        """Returns the names of those that have changed and cannot be put back."""
        lost = []
        with torch.no_grad():
            for full, module, name, buffer, version in self._buffers:
                module._buffers[name] = buffer
                if full in self._copies:
                    buffer.copy_(self._copies[full])
                elif buffer._version != version:
                    lost.append(full)
        return lost

    def put_back(self) -> None:
        """Makes all as it was, gradients too."""
        self._put_buffers_back()
        self._random.restore()
        for tensor, gradient in self._gradients:
            tensor.grad = gradient.to(tensor.device) if gradient is not None else None

    def add_gradients(self, factor: float) -> None:
        """Multiplies the gradients that there are by `factor`, and adds those that were set aside."""
        with torch.no_grad():
            for tensor, before in self._gradients:
                made = tensor.grad
                if made is not None and factor != 1.0:
                    tensor.grad = made = made * factor
                if before is None:
                    continue
                before = before.to(tensor.device)
                if made is None:
                    tensor.grad = before
                elif before.is_sparse and not made.is_sparse:
                    tensor.grad = made + before
                else:
                    tensor.grad = before.add_(made)  # the same tensor as before, as autograd would have left it
                del made
        self._gradients = []

    def unchanged(self) -> set[str]:
        """Names of the large buffers that are what they were."""
        return {
            full
            for full, module, name, buffer, version in self._buffers
            if buffer.nbytes >= _SMALL_BYTES and module._buffers.get(name) is buffer and buffer._version == version
        }
