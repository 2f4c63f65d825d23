"""What a plan needs to know of a machine: how much each tier holds, and how fast bytes move between them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields

from torchstorm.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds and sizes, measured here or written down elsewhere.

    Those from `half_flops` on say how fast the GPU computes. Only a forecast for hardware that is not here asks for
    them: where a step was measured, its times are known.

    Attributes:
        name: what it is, for people.
        device: the fast device, "cpu" or "cuda:<index>".
        vram_bytes: memory of the GPU in all; 0 where the CPU is the fast device.
        ram_bytes: memory of the host in all, as far as the process may use it.
        disk_bytes: free bytes where spill files go; 0 for no disk.
        d2h_bytes_per_s: from the GPU to pinned host memory; 0 for no GPU.
        h2d_bytes_per_s: the same for what comes back.
        disk_write_bytes_per_s: from host memory to the disk; 0 for no disk.
        disk_read_bytes_per_s: the same for what comes back.
        half_flops: operations per second in matrix products of float16 and bfloat16, dense, summed in float32.
        tf32_flops: the same in float32 with TF32 allowed.
        fp32_flops: the same in float32 without.
        attention_flops: operations per second in fused attention, forward.
        attention_backward_flops: the same in its backward.
        memory_bytes_per_s: bytes read and written on the GPU per second.
        kernel_s: seconds that a kernel takes besides, however small.
        launch_s: seconds that the host takes per operation.
        workspace_bytes: memory that cuBLAS holds from its first call on.

    Raises:
        PlanError: a number is negative or not finite.
    """

    name: str
    device: str = "cpu"
    vram_bytes: int = 0
    ram_bytes: int = 0
    disk_bytes: int = 0
    d2h_bytes_per_s: float = 0.0
    h2d_bytes_per_s: float = 0.0
    disk_write_bytes_per_s: float = 0.0
    disk_read_bytes_per_s: float = 0.0
    half_flops: float = 0.0
    tf32_flops: float = 0.0
    fp32_flops: float = 0.0
    attention_flops: float = 0.0
    attention_backward_flops: float = 0.0
    memory_bytes_per_s: float = 0.0
    kernel_s: float = 0.0
    launch_s: float = 0.0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "device"):
                if not isinstance(value, str):
                    raise PlanError(f"machine {self.name!r}: {field.name}={value!r} is not text.")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise PlanError(
                    f"machine {self.name!r}: {field.name}={value!r}, but it must be a number from 0 up "
                    "(0: there is no such tier)."
                )

    def to_json(self) -> str:
        """The machine as JSON text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Machine:
        """Reads what `to_json` wrote.

        Raises:
            PlanError: the text is not a machine.
        """
        try:
            return Machine(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise PlanError(f"this is not a machine that torchstorm wrote: {error}") from error
