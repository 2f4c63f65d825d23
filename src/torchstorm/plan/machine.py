"""A machine's properties for planning: sizes of the tiers, and bandwidths between them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields

from torchstorm.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds and sizes of a machine, measured or from a profile.

    The attributes from `half_flops` on describe the GPU's compute speed. Only forecasts for other hardware use them; a
    measured step has measured times.

    Attributes:
        name: name for messages.
        device: the fast device, "cpu" or "cuda:<index>".
        vram_bytes: total memory of the GPU; 0 if the CPU is the fast device.
        ram_bytes: total host memory that the process may use.
        disk_bytes: free bytes in the spill directory; 0 for no disk.
        d2h_bytes_per_s: bandwidth from the GPU to pinned host memory; 0 for no GPU.
        h2d_bytes_per_s: bandwidth from pinned host memory to the GPU; 0 for no GPU.
        disk_write_bytes_per_s: bandwidth from host memory to the disk; 0 for no disk.
        disk_read_bytes_per_s: bandwidth from the disk to host memory; 0 for no disk.
        disk_delay_s_per_byte: seconds by which the CPU's own compute is late for every byte that is meanwhile written
            to the disk and read back; 0 where it has cores to spare.
        half_flops: FLOP/s of dense float16 and bfloat16 matrix products with float32 accumulation.
        tf32_flops: FLOP/s of float32 matrix products with TF32.
        fp32_flops: FLOP/s of float32 matrix products without TF32.
        attention_flops: FLOP/s of fused attention in forward.
        attention_backward_flops: FLOP/s of fused attention in backward.
        memory_bytes_per_s: bandwidth of GPU memory, reads and writes together.
        kernel_s: fixed time per kernel in seconds.
        launch_s: host time per operation in seconds.
        workspace_bytes: size of cuBLAS's workspace, which exists from its first call on.

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
    disk_delay_s_per_byte: float = 0.0
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
                    "(0: no such tier)."
                )

    def to_json(self) -> str:
        """The machine as JSON text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Machine:
        """Parses the text of `to_json`.

        Raises:
            PlanError: the text is not a machine.
        """
        try:
            return Machine(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise PlanError(f"the text is not a machine written by torchstorm: {error}") from error
