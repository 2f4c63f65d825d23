"""Where the source lies that kernels for Hopper share."""

from pathlib import Path

HOPPER = Path(__file__).with_suffix(".cuh")
