"""Runs the tests marked `nvme` in a virtual machine with emulated NVMe devices: `make test-nvme`.

QEMU boots Debian's kernel with a small initramfs, which mounts this machine's files read-only (9p) and runs pytest
there with the same interpreter: nothing is installed or copied, and no disk of this machine is touched. KVM is used
where there is one; without it everything is emulated, which takes minutes. The devices:

    /dev/nvme0n1  64 MiB, sectors of 512 bytes   } one controller, commands of at most 128 KiB
    /dev/nvme0n2  64 MiB, sectors of 4096 bytes  }
    /dev/nvme1n1, /dev/nvme2n1  16 MiB each, which a test removes while they are in use

The kernel (70 MB) and busybox are Debian packages, downloaded once into .qemu/. Elsewhere, put linux-image-*-amd64 and
busybox-static as .deb files there. Needs qemu-system-x86_64 and dpkg-deb.

    python tools/test_nvme.py [pytest's arguments]
"""

from __future__ import annotations

import gzip
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / ".qemu"
MODULES = ["virtio_pci", "9pnet_virtio", "9p", "nvme"]
LIMIT_S = 1500
ENDED = "torchstorm: pytest ended with "

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in {modules}; do insmod /modules/$module.ko; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host
mount --move /proc /host/proc
mount --move /sys /host/sys
mount --move /dev /host/dev
mkdir -p /host/dev/shm
mount -t tmpfs tmpfs /host/dev/shm
for tries in 1 2 3 4 5 6 7 8 9 10; do [ -b /host/dev/nvme2n1 ] && break; sleep 1; done
chroot /host /bin/sh -c {command}
echo "{ended}$?"
poweroff -f
"""


def main(arguments: list[str]) -> int:
    """Returns pytest's exit status, or 1 where the virtual machine did not get that far."""
    if not shutil.which("qemu-system-x86_64"):
        stop("there is no qemu-system-x86_64. Debian and Ubuntu: apt-get install qemu-system-x86")
    library = REPOSITORY / ".xnvme" / "lib" / "libxnvme.so"
    if not library.exists() and "XNVME_LIBRARY_PATH" not in os.environ:
        stop("the xNVMe library is not built, and its tests would fail: run `make xnvme` first")
    kernel, modules, busybox = unpacked()
    with tempfile.TemporaryDirectory() as folder:
        initramfs = Path(folder) / "initramfs.gz"
        initramfs.write_bytes(make_initramfs(modules, busybox, guest_command(arguments)))
        disks = []
        for name, size_bytes in [("small", 2**26), ("large", 2**26), ("gone1", 2**24), ("gone2", 2**24)]:
            disk = Path(folder) / name
            with disk.open("wb") as file:
                file.truncate(size_bytes)
            disks.append(disk)
        return boot(kernel, initramfs, disks)


def stop(reason: str) -> None:
    """Ends with a message."""
    sys.exit(f"make test-nvme: {reason}")


def unpacked() -> tuple[Path, Path, Path]:
    """(kernel, folder of its modules, busybox), from the packages in .qemu/, downloaded where they are not there."""
    CACHE.mkdir(exist_ok=True)
    files = []
    for pattern, package in [
        ("linux-image-*-amd64_*.deb", "linux-image-amd64"),
        ("busybox-static_*.deb", "busybox-static"),
    ]:
        if not list(CACHE.glob(pattern)):
            download(package)
        files.append(max(CACHE.glob(pattern)))
    root = CACHE / "root"
    stamp = root / "unpacked"
    wanted = "\n".join(file.name for file in files)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(root, ignore_errors=True)
        for file in files:
            subprocess.run(["dpkg-deb", "-x", str(file), str(root)], check=True)
        stamp.write_text(wanted)
    (kernel,) = (root / "boot").glob("vmlinuz-*")
    modules = next(path for path in [*root.glob("lib/modules/*"), *root.glob("usr/lib/modules/*")] if path.is_dir())
    return kernel, modules, next(path for path in [root / "bin/busybox", root / "usr/bin/busybox"] if path.exists())


def download(package: str) -> None:
    """Fetches a Debian package, or the kernel that a package of kernels stands for."""
    if not shutil.which("apt-get"):
        stop(f"{package} comes from Debian, and there is no apt-get here. Put its .deb file into {CACHE}")
    if package == "linux-image-amd64":
        listed = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True, check=False).stdout
        found = re.search(r"Depends: (linux-image-\S+)", listed)
        if found is None:
            stop("apt knows no linux-image-amd64: run `apt-get update` first")
        else:
            package = found[1]
    if subprocess.run(["apt-get", "download", "--quiet", package], cwd=CACHE, check=False).returncode:
        stop(f"{package} could not be downloaded: run `apt-get update` first, or put its .deb file into {CACHE}")


def guest_command(arguments: list[str]) -> str:
    """What runs in the virtual machine."""
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/dev/shm",
        "TMPDIR": "/dev/shm",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": f"{REPOSITORY / 'src'}",
        "HYPOTHESIS_STORAGE_DIRECTORY": "/dev/shm/hypothesis",
        "OMP_NUM_THREADS": "1",
        "TORCHSTORM_NVME_512": "0n1",
        "TORCHSTORM_NVME_4096": "0n2",
        "TORCHSTORM_NVME_REMOVED": "1n1 2n1",
    }
    if "XNVME_LIBRARY_PATH" in os.environ:
        environment["XNVME_LIBRARY_PATH"] = os.environ["XNVME_LIBRARY_PATH"]
    settings = [f"{name}={value}" for name, value in environment.items()]
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "nvme",
        "--fail-on-skip",
        "-p",
        "no:cacheprovider",
        "-v",
        "--color=no",
    ]
    pytest += ["--durations=5", "tests/storage/test_nvme_device.py", *arguments]
    return f"cd {shlex.quote(str(REPOSITORY))} && exec env -i {shlex.join(settings + pytest)}"


def make_initramfs(modules: Path, busybox: Path, command: str) -> bytes:
    """A compressed archive of what boots: busybox, the modules in the order in which they load, and /init."""
    paths = {path.name.removesuffix(".ko").replace("-", "_"): path for path in modules.rglob("*.ko")}
    ordered: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in ordered or name not in paths:  # built into the kernel
            return
        code = paths[name].read_bytes()
        needs = re.search(rb"\0depends=([^\0]*)", code)
        for need in needs[1].decode().split(",") if needs else []:
            add(need.replace("-", "_"))
        ordered[name] = code

    for name in MODULES:
        add(name)
    init = INIT.format(modules=" ".join(ordered), command=shlex.quote(command), ended=ENDED)
    entries = [(folder, 0o040755, b"") for folder in ["bin", "dev", "host", "modules", "proc", "sys"]]
    entries += [("bin/busybox", 0o100755, busybox.read_bytes()), ("init", 0o100755, init.encode())]
    entries += [(f"modules/{name}.ko", 0o100644, code) for name, code in ordered.items()]
    return gzip.compress(cpio(entries), 1)


def cpio(entries: list[tuple[str, int, bytes]]) -> bytes:
    """The archive format that the kernel unpacks ("newc"), of (path, mode, content)."""
    parts = []
    for number, (path, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        name = path.encode() + b"\0"
        fields = [number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0]
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
        parts += [head, bytes(-len(head) % 4), content, bytes(-len(content) % 4)]
    return b"".join(parts)


def accelerator() -> str:
    """KVM where the processor has it: within a virtual machine, /dev/kvm alone may open and then hang the guest."""
    flags = Path("/proc/cpuinfo").read_text().split()
    usable = ("vmx" in flags or "svm" in flags) and os.access("/dev/kvm", os.R_OK | os.W_OK)
    return "kvm" if usable else "tcg,thread=multi"


def boot(kernel: Path, initramfs: Path, disks: list[Path]) -> int:
    """Runs the virtual machine, shows its console, and returns pytest's exit status."""
    small, large, gone1, gone2 = disks
    command = ["qemu-system-x86_64", "-accel", accelerator(), "-cpu", "max", "-machine", "q35"]
    command += ["-smp", "2", "-m", "3G", "-nodefaults", "-nographic", "-no-reboot", "-serial", "stdio"]
    command += ["-kernel", str(kernel), "-initrd", str(initramfs), "-append", "console=ttyS0 quiet panic=-1"]
    command += ["-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"]
    for name, disk in [("small", small), ("large", large), ("gone1", gone1), ("gone2", gone2)]:
        command += ["-drive", f"file={disk},format=raw,if=none,id={name}"]
    command += ["-device", "nvme,id=nvme0,serial=storm0,mdts=5"]
    command += ["-device", "nvme-ns,bus=nvme0,drive=small,nsid=1,logical_block_size=512,physical_block_size=512"]
    command += ["-device", "nvme-ns,bus=nvme0,drive=large,nsid=2,logical_block_size=4096,physical_block_size=4096"]
    command += ["-device", "nvme,serial=storm1,drive=gone1", "-device", "nvme,serial=storm2,drive=gone2"]
    started = time.monotonic()
    status = 1
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as machine:
        limit = threading.Timer(LIMIT_S, machine.kill)
        limit.start()
        try:
            assert machine.stdout is not None
            for line in machine.stdout:
                text = line.decode(errors="replace").rstrip()
                found = re.search(re.escape(ENDED) + r"(\d+)", text)
                if found is not None:
                    status = int(found[1])
                print(text, flush=True)
        finally:
            limit.cancel()
            machine.kill()
    print(f"make test-nvme: {time.monotonic() - started:.0f} s in the virtual machine, exit status {status}")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the virtual machine ends, too
    sys.exit(main(sys.argv[1:]))
