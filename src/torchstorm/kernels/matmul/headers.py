"""Finds the headers of CUTLASS and CUDA in the wheels of the extra `cutlass`."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from torchstorm.errors import KernelError

CUTLASS_NEEDS = ("cutlass_library",)
"""Modules that CUTLASS needs."""

CUTLASS_ADVICE = (
    "pip install 'torchstorm[cutlass]' installs compatible versions (CUTLASS 4.2 and nvidia-cuda-cccl below 13.2); "
    "'tensor-cores' and 'wgmma' need none"
)
"""The remedy if the installed headers do not compile."""

_HEADERS = {
    "cutlass/cutlass.h": "nvidia-cutlass",
    "cuda_fp16.h": "nvidia-cuda-runtime",
    "cuda/std/cstdint": "nvidia-cuda-cccl",
    "crt/host_defines.h": "nvidia-cuda-crt",
}
"""One header of each package, to find its folder."""


@functools.cache
def cutlass_includes() -> tuple[Path, ...]:
    """Include folders for the compiler.

    Raises:
        KernelError: one of the packages is not installed, or has another layout.
    """
    spec = find_spec("cutlass_library")
    folders = [Path(spec.origin).parent / "source" / "include"] if spec and spec.origin else []
    for place in getattr(find_spec("nvidia"), "submodule_search_locations", None) or []:
        folders += [*Path(place).glob("cu*/include"), *Path(place).glob("cu*/include/cccl")]
        folders += [*Path(place).glob("cuda_*/include"), *Path(place).glob("cuda_*/include/cccl")]
    found = {}
    for header, package in _HEADERS.items():
        found[package] = next((folder for folder in folders if (folder / header).exists()), None)
    missing = [package for package, folder in found.items() if folder is None]
    if missing:
        raise KernelError(
            f"variant='cutlass' needs headers of {', '.join(missing)}, which were not found in {len(folders)} folders. "
            "pip install 'torchstorm[cutlass]' installs them; 'tensor-cores' and 'wgmma' need none."
        )
    return tuple(dict.fromkeys(folder for folder in found.values() if folder is not None))


@functools.cache
def cutlass_version() -> str:
    """The versions of all packages whose headers are used."""
    versions = []
    for package in _HEADERS.values():
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} of unknown version")
    return ", ".join(versions)
