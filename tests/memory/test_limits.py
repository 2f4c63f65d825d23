"""Limits read from made-up machines: a tree of /proc and /sys under a temporary directory."""

from pathlib import Path

import psutil
import pytest

from torchstorm.memory.limits import available_ram_bytes, cgroup_limit_bytes, total_ram_bytes

GIB = 2**30
V1_UNLIMITED = 2**63 - 4096


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def make_machine(root: Path, *, cgroup: str, mountinfo: str, total: int = 64 * GIB, available: int = 48 * GIB) -> None:
    meminfo = f"MemTotal: {total // 1024:>12} kB\nMemFree: 77 kB\nMemAvailable: {available // 1024:>12} kB\n"
    write(root / "proc/meminfo", meminfo + "HugePages_Total:       0\n")
    write(root / "proc/self/cgroup", cgroup)
    write(root / "proc/self/mountinfo", mountinfo)


def make_v2(root: Path, *, path: str = "/app/job", mount_root: str = "/", **memory: int) -> None:
    mountinfo = f"30 23 0:26 {mount_root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    make_machine(root, cgroup=f"0::{path}\n", mountinfo=f"22 27 0:21 / /proc rw - proc proc rw\n{mountinfo}", **memory)


def make_v1(root: Path, *, path: str = "/docker/abc", mount_root: str = "/") -> None:
    make_machine(
        root,
        cgroup=f"9:name=systemd:/\n4:memory:{path}\n1:cpu:/\n0::/\n",
        mountinfo="32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        f"35 31 0:32 {mount_root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n",
    )


def limit_v2(folder: Path, *, limit: str, used: int, inactive: int = 0, high: str = "max") -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.high", f"{high}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_anon 123\ninactive_file {inactive}\nactive_file 7\n")


def limit_v1(folder: Path, *, limit: int, used: int, inactive: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{used}\n")
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\n")


def test_without_cgroups_what_the_machine_has_counts(tmp_path: Path) -> None:
    make_machine(tmp_path, cgroup="", mountinfo="")
    assert (total_ram_bytes(tmp_path), available_ram_bytes(tmp_path)) == (64 * GIB, 48 * GIB)
    assert cgroup_limit_bytes(tmp_path) is None


def test_version_2_leaves_its_limit_less_usage_that_cannot_be_given_back(tmp_path: Path) -> None:
    make_v2(tmp_path)
    limit_v2(tmp_path / "sys/fs/cgroup/app/job", limit=str(16 * GIB), used=6 * GIB, inactive=2 * GIB)
    assert cgroup_limit_bytes(tmp_path) == total_ram_bytes(tmp_path) == 16 * GIB
    assert available_ram_bytes(tmp_path) == 12 * GIB


def test_version_2_without_a_limit_leaves_what_the_machine_has(tmp_path: Path) -> None:
    make_v2(tmp_path)
    limit_v2(tmp_path / "sys/fs/cgroup/app/job", limit="max", used=6 * GIB)
    assert cgroup_limit_bytes(tmp_path) is None
    assert available_ram_bytes(tmp_path) == 48 * GIB


def test_the_tightest_level_of_nested_cgroups_counts_and_it_need_not_be_the_smallest_limit(tmp_path: Path) -> None:
    make_v2(tmp_path)
    limit_v2(tmp_path / "sys/fs/cgroup/app/job", limit=str(10 * GIB), used=1 * GIB)
    limit_v2(tmp_path / "sys/fs/cgroup/app", limit=str(20 * GIB), used=15 * GIB)
    assert cgroup_limit_bytes(tmp_path) == 10 * GIB
    assert available_ram_bytes(tmp_path) == 5 * GIB


def test_a_limit_that_throttles_counts_as_one_that_kills(tmp_path: Path) -> None:
    make_v2(tmp_path)
    limit_v2(tmp_path / "sys/fs/cgroup/app/job", limit=str(16 * GIB), high=str(8 * GIB), used=1 * GIB)
    assert available_ram_bytes(tmp_path) == 7 * GIB


def test_a_container_of_version_2_finds_its_limit_at_the_top_of_what_is_mounted(tmp_path: Path) -> None:
    make_v2(tmp_path, path="/")
    limit_v2(tmp_path / "sys/fs/cgroup", limit=str(4 * GIB), used=1 * GIB)
    assert available_ram_bytes(tmp_path) == 3 * GIB


def test_nothing_above_the_mount_point_is_read(tmp_path: Path) -> None:
    make_v2(tmp_path)
    limit_v2(tmp_path / "sys/fs", limit=str(1 * GIB), used=0)
    assert cgroup_limit_bytes(tmp_path) is None


def test_version_1_counts_the_inactive_file_cache_of_the_whole_subtree(tmp_path: Path) -> None:
    make_v1(tmp_path)
    limit_v1(tmp_path / "sys/fs/cgroup/memory/docker/abc", limit=8 * GIB, used=5 * GIB, inactive=1 * GIB)
    limit_v1(tmp_path / "sys/fs/cgroup/memory", limit=V1_UNLIMITED, used=60 * GIB)
    assert cgroup_limit_bytes(tmp_path) == 8 * GIB
    assert available_ram_bytes(tmp_path) == 4 * GIB


def test_version_1_writes_no_limit_as_a_huge_number(tmp_path: Path) -> None:
    make_v1(tmp_path)
    limit_v1(tmp_path / "sys/fs/cgroup/memory/docker/abc", limit=V1_UNLIMITED, used=5 * GIB)
    assert cgroup_limit_bytes(tmp_path) is None
    assert available_ram_bytes(tmp_path) == 48 * GIB


def test_a_container_of_version_1_whose_paths_are_told_from_the_hosts_top(tmp_path: Path) -> None:
    make_v1(tmp_path, path="/docker/abc", mount_root="/docker/abc")
    limit_v1(tmp_path / "sys/fs/cgroup/memory", limit=8 * GIB, used=5 * GIB)
    assert available_ram_bytes(tmp_path) == 3 * GIB


def test_a_cgroup_inside_such_a_container(tmp_path: Path) -> None:
    make_v1(tmp_path, path="/docker/abc/job", mount_root="/docker/abc")
    limit_v1(tmp_path / "sys/fs/cgroup/memory/job", limit=2 * GIB, used=1 * GIB)
    assert available_ram_bytes(tmp_path) == 1 * GIB


def test_usage_beyond_the_limit_leaves_nothing_rather_than_less(tmp_path: Path) -> None:
    make_v2(tmp_path)
    limit_v2(tmp_path / "sys/fs/cgroup/app/job", limit=str(1 * GIB), used=2 * GIB)
    assert available_ram_bytes(tmp_path) == 0


def test_files_that_are_missing_or_odd_are_no_limit(tmp_path: Path) -> None:
    make_v2(tmp_path, path="/gone")
    with (tmp_path / "proc/self/mountinfo").open("a") as file:
        file.write("nonsense\n1 2 3:4 / /short - \n9 1 0:9 / /v1 rw - cgroup cgroup rw,memory\n")
    write(tmp_path / "sys/fs/cgroup/gone/memory.max", f"{3 * GIB}\n")  # no usage, no statistics beside it
    assert available_ram_bytes(tmp_path) == 3 * GIB


def test_where_there_is_no_proc_the_system_is_asked(tmp_path: Path) -> None:
    assert total_ram_bytes(tmp_path) == psutil.virtual_memory().total
    assert available_ram_bytes(tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.5)


def test_this_machine_has_some_ram_left_and_not_more_than_it_has() -> None:
    assert 0 < available_ram_bytes() < total_ram_bytes() <= psutil.virtual_memory().total
