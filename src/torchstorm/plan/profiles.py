"""Profiles of machines, to make forecasts for hardware that is not available.

Every rate is one that training steps reach, below the data sheet's: continuous matrix products run into the power
limit, and links and memories have overhead (headers, refresh). The H200's link, memory, half-precision and attention
rates were measured. All else is the vendor's numbers times an estimated efficiency, or an estimate.
"""

from __future__ import annotations

from torchstorm.errors import PlanError
from torchstorm.plan.machine import Machine

_GIB, _GB, _TERA = 2**30, 1e9, 1e12

_PROFILES = (
    # NVIDIA Ada GPU architecture white paper, table 2: 24 GB GDDR6X at 1008 GB/s, PCIe 4.0 x16; dense with float32
    # sums: 165.2 TFLOP/s in float16 and bfloat16, 82.6 in TF32, 82.6 in float32. Around it a workstation.
    Machine(
        name="rtx4090",
        device="cuda:0",
        vram_bytes=24 * _GIB,
        ram_bytes=64 * _GIB,
        disk_bytes=500 * _GIB,
        d2h_bytes_per_s=25 * _GB,
        h2d_bytes_per_s=25 * _GB,
        disk_write_bytes_per_s=5 * _GB,
        disk_read_bytes_per_s=6.5 * _GB,
        half_flops=145 * _TERA,
        tf32_flops=72 * _TERA,
        fp32_flops=55 * _TERA,
        attention_flops=130 * _TERA,
        attention_backward_flops=105 * _TERA,
        memory_bytes_per_s=920 * _GB,
        kernel_s=2e-6,
        launch_s=8e-6,
        workspace_bytes=16 * 2**20,
    ),
    # NVIDIA GA102 white paper, table 2: 24 GB GDDR6X at 936 GB/s, PCIe 4.0 x16; 71 TFLOP/s dense in float16 and
    # bfloat16 with float32 sums, 35.6 in TF32, 35.6 in float32.
    Machine(
        name="rtx3090",
        device="cuda:0",
        vram_bytes=24 * _GIB,
        ram_bytes=64 * _GIB,
        disk_bytes=500 * _GIB,
        d2h_bytes_per_s=24 * _GB,
        h2d_bytes_per_s=24 * _GB,
        disk_write_bytes_per_s=5 * _GB,
        disk_read_bytes_per_s=6.5 * _GB,
        half_flops=62 * _TERA,
        tf32_flops=31 * _TERA,
        fp32_flops=23 * _TERA,
        attention_flops=55 * _TERA,
        attention_backward_flops=45 * _TERA,
        memory_bytes_per_s=850 * _GB,
        kernel_s=2e-6,
        launch_s=8e-6,
        workspace_bytes=16 * 2**20,
    ),
    # A100 80GB SXM data sheet: 80 GB HBM2e at 2039 GB/s, PCIe 4.0 x16; 312 TFLOP/s dense in float16 and bfloat16, 156
    # in TF32, 19.5 in float32. Attention: FlashAttention-2 (Dao 2023, figures 4 and 5, causal, heads of 128). The host:
    # an eighth of a DGX A100.
    Machine(
        name="a100",
        device="cuda:0",
        vram_bytes=80 * _GIB,
        ram_bytes=128 * _GIB,
        disk_bytes=2000 * _GIB,
        d2h_bytes_per_s=25 * _GB,
        h2d_bytes_per_s=25 * _GB,
        disk_write_bytes_per_s=3 * _GB,
        disk_read_bytes_per_s=6 * _GB,
        half_flops=245 * _TERA,
        tf32_flops=122 * _TERA,
        fp32_flops=18 * _TERA,
        attention_flops=190 * _TERA,
        attention_backward_flops=160 * _TERA,
        memory_bytes_per_s=1700 * _GB,
        kernel_s=2e-6,
        launch_s=8e-6,
        workspace_bytes=16 * 2**20,
    ),
    # H100 SXM data sheet: 80 GB HBM3 at 3.35 TB/s, PCIe 5.0 x16; 989 TFLOP/s dense in float16 and bfloat16, 495 in
    # TF32, 67 in float32. The same chip as the H200 below, with slower memory. The host: an eighth of a DGX H100.
    Machine(
        name="h100",
        device="cuda:0",
        vram_bytes=80 * _GIB,
        ram_bytes=256 * _GIB,
        disk_bytes=3500 * _GIB,
        d2h_bytes_per_s=55 * _GB,
        h2d_bytes_per_s=55 * _GB,
        disk_write_bytes_per_s=4 * _GB,
        disk_read_bytes_per_s=6.5 * _GB,
        half_flops=630 * _TERA,
        tf32_flops=315 * _TERA,
        fp32_flops=50 * _TERA,
        attention_flops=560 * _TERA,
        attention_backward_flops=495 * _TERA,
        memory_bytes_per_s=3000 * _GB,
        kernel_s=2e-6,
        launch_s=8e-6,
        workspace_bytes=64 * 2**20,
    ),
    # Measured on one H200 (SXM, 141 GB HBM3e; the process sees 139.8 GiB): pinned copies 55 GB/s one way; copies in
    # memory 4.3 TB/s; bfloat16 products 744 to 796 TFLOP/s alone, of which a whole step sustains less; cuDNN attention
    # 578 to 594 TFLOP/s forward and 517 to 547 with its backward. TF32 and float32 by the data sheet's ratios.
    Machine(
        name="h200",
        device="cuda:0",
        vram_bytes=139 * _GIB,
        ram_bytes=256 * _GIB,
        disk_bytes=3500 * _GIB,
        d2h_bytes_per_s=55 * _GB,
        h2d_bytes_per_s=55 * _GB,
        disk_write_bytes_per_s=4 * _GB,
        disk_read_bytes_per_s=6.5 * _GB,
        half_flops=650 * _TERA,
        tf32_flops=325 * _TERA,
        fp32_flops=50 * _TERA,
        attention_flops=585 * _TERA,
        attention_backward_flops=517 * _TERA,
        memory_bytes_per_s=4300 * _GB,
        kernel_s=2e-6,
        launch_s=8e-6,
        workspace_bytes=64 * 2**20,
    ),
    # One GPU of a GB200 superchip. NVIDIA GB200 NVL72 data sheet: 186 GB HBM3e at 8 TB/s and 2500 TFLOP/s dense in
    # bfloat16, 1250 in TF32, 80 in float32, a GPU; half of the Grace CPU's 480 GB. NVLink-C2C has 900 GB/s both ways
    # between the CPU and its two GPUs: 225 GB/s one way for each, of which such links reach about 80 %.
    Machine(
        name="gb200",
        device="cuda:0",
        vram_bytes=184 * _GIB,
        ram_bytes=220 * _GIB,
        disk_bytes=3500 * _GIB,
        d2h_bytes_per_s=180 * _GB,
        h2d_bytes_per_s=180 * _GB,
        disk_write_bytes_per_s=5 * _GB,
        disk_read_bytes_per_s=12 * _GB,
        half_flops=1550 * _TERA,
        tf32_flops=775 * _TERA,
        fp32_flops=60 * _TERA,
        attention_flops=1200 * _TERA,
        attention_backward_flops=950 * _TERA,
        memory_bytes_per_s=7000 * _GB,
        kernel_s=2e-6,
        launch_s=8e-6,
        workspace_bytes=64 * 2**20,
    ),
)

PROFILES: dict[str, Machine] = {machine.name: machine for machine in _PROFILES}
"""Profiles by name, for `torchstorm plan --machine NAME`."""


def named_machine(name: str) -> Machine:
    """The profile of that name. Letter case, spaces, dashes and underscores are ignored.

    Raises:
        PlanError: the name is unknown. The message lists the known names.
    """
    found = PROFILES.get(name.lower().translate(str.maketrans("", "", " -_")))
    if found is None:
        raise PlanError(
            f"machine={name!r} is not a machine that torchstorm knows: use one of {', '.join(PROFILES)}. For another, "
            "give a torchstorm.plan.machine.Machine with its sizes and speeds."
        )
    return found
