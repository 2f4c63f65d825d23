"""Compiles CUDA C++ kernels with NVRTC for the current GPU, caches them on disk, and launches them on PyTorch's stream.

NVRTC needs no CUDA toolkit, no headers and no driver, so every source can be compiled anywhere (`compile_source`).
Cubins are cached in the user's cache folder under a hash of source, options and compiler version, with a checksum:
damaged files are compiled again. The driver is called through its stable C interface.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import io
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from torchstorm.errors import KernelError

NEEDS = ("cuda.core", "cuda.bindings")
"""Modules needed for compilation."""

_OPTIONS = ("-v",)  # of ptxas: registers and spills in the log
_DIGEST_BYTES = 32
_SHARED_BYTES_OF_ANY_BLOCK = 48 << 10
_SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_lock = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Source:
    """A kernel's source, which identifies it within a process.

    Attributes:
        kernel: name of the `extern "C"` function.
        files: source files, concatenated in order.
        defines: macros and their values.
        shared_bytes: dynamic shared memory per block.
        code: source that comes after that of the files.
        includes: folders of third-party headers.
        headers: names and versions of these headers, for the cache's hash and for messages.
        advice: remedy if it does not compile with them.
    """

    kernel: str
    files: tuple[Path, ...] = ()
    code: str = ""
    defines: tuple[tuple[str, int], ...] = ()
    shared_bytes: int = 0
    includes: tuple[Path, ...] = ()
    headers: str = ""
    advice: str = ""

    def text(self) -> str:
        """The compiler's input. #line directives make its messages refer to the files."""
        return "".join(f'#line 1 "{path.name}"\n{path.read_text()}\n' for path in self.files) + self.code

    @property
    def name(self) -> str:
        """What messages call the source."""
        return self.files[-1].name if self.files else f"{self.kernel}.cu"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A cubin and the compiler's log: warnings, registers and spills."""

    cubin: bytes
    log: str


def compile_source(source: Source, arch: str) -> Compiled:
    """Compiles for an architecture such as "sm_80" or "sm_90a", which need not be present.

    Raises:
        KernelError: compilation failed; the message has the compiler's log.
    """
    core = import_module("cuda.core")
    options = core.ProgramOptions(
        name=source.name,
        arch=arch,
        std="c++17",
        ptxas_options=list(_OPTIONS),
        define_macro=[(name, str(value)) for name, value in source.defines] or None,
        include_path=[str(path) for path in source.includes] or None,
        # Third-party headers were not all written for NVRTC: they lack __device__ annotations, and cause warnings.
        device_as_default_execution_space=bool(source.includes),
        disable_warnings=bool(source.includes),
    )
    log = io.StringIO()
    try:
        made = core.Program(source.text(), "c++", options).compile("cubin", logs=log)
    except Exception as error:  # cuda-core's exception classes are not public
        found = f", with the headers of {source.headers}. {source.advice}" if source.headers else ""
        raise KernelError(
            f"{source.kernel} of {source.name} with {dict(source.defines)} does not compile for {arch} by "
            f"NVRTC {compiler_version()}{found}:\n{error}\n{log.getvalue()}"
        ) from error
    return Compiled(cubin=bytes(made.code), log=log.getvalue())


@functools.cache
def is_usable() -> bool:
    """Whether the modules are installed, and find NVRTC's library."""
    try:
        import_module("cuda.core")
        compiler_version()
    except Exception:  # the bindings raise various classes if the library is missing
        return False
    return True


@functools.cache
def compiler_version() -> str:
    """NVRTC's version, such as "13.0"."""
    _, major, minor = import_module("cuda.bindings.nvrtc").nvrtcVersion()
    return f"{major}.{minor}"


def cache_folder() -> Path:
    """Folder of cached cubins: $XDG_CACHE_HOME/torchstorm/cubins, or the same under ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path("~/.cache").expanduser()) / "torchstorm" / "cubins"


def cubin_of(source: Source, arch: str) -> bytes:
    """Returns the cubin from the cache, or compiles and caches it. Ignores a cache folder that is not writable.

    Raises:
        KernelError: compilation failed.
    """
    told = repr((source.text(), source.defines, source.headers, arch, _OPTIONS, compiler_version()))
    path = cache_folder() / f"{source.kernel}-{arch}-{hashlib.sha256(told.encode()).hexdigest()[:32]}.cubin"
    with suppress(OSError):
        kept = path.read_bytes()
        digest, cubin = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        if hashlib.sha256(cubin).digest() == digest:
            return cubin
    cubin = compile_source(source, arch).cubin
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name and renamed, so that other processes never see an incomplete file.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, path)
    return cubin


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for; from Hopper on with its architecture-specific instructions."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def launch(  # pragma: gpu
    source: Source, *arguments: Any, grid: tuple[int, int, int], threads: int, device: torch.device
) -> None:
    """Runs a kernel on PyTorch's current stream of the device.

    Args:
        source: the kernel; compiled and loaded at its first launch on a device.
        arguments: the kernel's arguments as ctypes values and structures.
        grid: number of blocks.
        threads: threads per block.
        device: a GPU.

    Raises:
        KernelError: it does not compile, or the driver reports an error.
    """
    with torch.cuda.device(device):
        function = _function(source, torch.cuda.current_device())
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = [ctypes.c_uint(size) for size in (*grid, threads, 1, 1, source.shared_bytes)]
        _call("cuLaunchKernel", function, *sizes, stream, places, None, what=f"{source.kernel}, grid {grid}")


def launcher(source: Source, device: torch.device, places: Any) -> Callable[[int, int], None]:  # pragma: gpu
    """A function that runs a kernel on PyTorch's current stream and does no more: it takes the host a few microseconds.

    Args:
        source: the kernel; compiled and loaded now.
        device: a GPU, which is current with its context whenever the function is called.
        places: a ctypes array of the addresses of the kernel's arguments, which are read at each call.

    Returns:
        Takes the number of blocks, and of threads in each.

    Raises:
        KernelError: it does not compile; and from the function, the driver reports an error.
    """
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        function = _function(source, index)
    run, stream_of = _launch_at_once(), torch._C._cuda_getCurrentRawStream

    def launch_it(num_blocks: int, threads: int) -> None:
        if run(function, num_blocks, 1, 1, threads, 1, 1, 0, stream_of(index), places, None):
            raise KernelError(f"{source.kernel}: cuLaunchKernel failed for {num_blocks} blocks of {threads} threads.")

    return launch_it


@functools.cache
def _launch_at_once() -> Any:  # pragma: gpu
    """cuLaunchKernel, without giving up Python's lock: having it back takes longer."""
    run = ctypes.PyDLL("libcuda.so.1").cuLaunchKernel
    run.argtypes = (ctypes.c_void_p, *(ctypes.c_uint,) * 7, *(ctypes.c_void_p,) * 3)
    return run


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),  # grid size, block size, dynamic shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


_CLUSTER_ATTRIBUTE = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_num_clusters: dict[tuple[Source, int], int] = {}


def num_clusters(source: Source, *, cluster: int, threads: int, device: torch.device) -> int:  # pragma: gpu
    """Number of clusters of `cluster` blocks that run at the same time on an idle GPU.

    Raises:
        KernelError: the kernel does not compile, or no such cluster fits.
    """
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        found = _num_clusters.get((source, index))
        if found is not None:
            return found
        function = _function(source, index)
        attribute = _Attribute(id=_CLUSTER_ATTRIBUTE)
        attribute.value[:3] = cluster, 1, 1
        config = _LaunchConfig(attributes=ctypes.pointer(attribute), num_attributes=1)
        config.sizes[:] = cluster, 1, 1, threads, 1, 1, source.shared_bytes
        count = ctypes.c_int()
        what = f"{source.kernel}: clusters of {cluster} blocks of {threads} threads and {source.shared_bytes} bytes"
        _call("cuOccupancyMaxActiveClusters", ctypes.byref(count), function, ctypes.byref(config), what=what)
    if count.value < 1:
        raise KernelError(f"{what}: none fits on {device}.")
    return _num_clusters.setdefault((source, index), count.value)


TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
TENSOR_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
SWIZZLE_128B = 3  # CUtensorMapSwizzle
_L2_PROMOTION_256B = 3  # CUtensorMapL2promotion


class TensorMap(ctypes.Structure):
    """A tensor map for the copy engine (TMA); a kernel argument."""

    _fields_ = (("bytes", ctypes.c_ubyte * TENSOR_MAP_BYTES),)


def tensor_map(  # pragma: gpu
    address: int, dtype: torch.dtype, sizes: Sequence[int], strides_bytes: Sequence[int], box: Sequence[int]
) -> TensorMap:
    """A tensor map with 128-byte swizzle in shared memory.

    Args:
        address: address of the first element, a multiple of 16.
        dtype: dtype of the elements.
        sizes: sizes of the dimensions, the contiguous one first.
        strides_bytes: strides of all dimensions but the first, multiples of 16.
        box: elements of each dimension per copy, at most 256; 128 bytes of the first.

    Raises:
        KernelError: the driver reports an error.
    """
    room = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
    made = TensorMap.from_buffer(room, -ctypes.addressof(room) % _TENSOR_MAP_ALIGNMENT)
    rank = len(sizes)
    _call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(made),
        ctypes.c_int(TENSOR_MAP_DTYPES[dtype]),
        ctypes.c_uint(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides_bytes),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        ctypes.c_int(0),  # no interleaving
        ctypes.c_int(SWIZZLE_128B),
        ctypes.c_int(_L2_PROMOTION_256B),
        ctypes.c_int(0),  # zeros outside the tensor
        what=f"a tensor map of sizes {tuple(sizes)}, strides {tuple(strides_bytes)} bytes, box {tuple(box)}",
    )
    return made


_functions: dict[tuple[Source, int], ctypes.c_void_p] = {}


def _function(source: Source, index: int) -> ctypes.c_void_p:  # pragma: gpu
    found = _functions.get((source, index))
    if found is not None:
        _be_current(index)
        return found
    with _lock:
        _be_current(index)
        image = cubin_of(source, arch_of(torch.cuda.get_device_capability(index)))
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        what = f"{source.kernel} on cuda:{index}"
        _call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image), what=what)
        name = ctypes.c_char_p(source.kernel.encode())
        _call("cuModuleGetFunction", ctypes.byref(function), module, name, what=what)
        if source.shared_bytes > _SHARED_BYTES_OF_ANY_BLOCK:
            most = ctypes.c_int(source.shared_bytes)
            _call("cuFuncSetAttribute", function, ctypes.c_int(_SHARED_BYTES_ATTRIBUTE), most, what=what)
        return _functions.setdefault((source, index), function)


def _be_current(index: int) -> None:  # pragma: gpu
    """Makes the device's context current. A thread without earlier CUDA calls, such as autograd's, has none."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context), what="the current context")
    if context.value is None:
        device, what = ctypes.c_int(), f"the context of cuda:{index}"
        _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index), what=what)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device, what=what)
        _call("cuCtxSetCurrent", context, what=what)


@functools.cache
def _driver() -> ctypes.CDLL:  # pragma: gpu
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any, what: str) -> None:  # pragma: gpu
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(ctypes.c_int(result), ctypes.byref(text))
        said = (text.value or b"unknown").decode()
        raise KernelError(f"{what}: {name} failed with {result}, {said}.")
