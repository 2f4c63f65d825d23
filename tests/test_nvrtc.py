"""The compiler of CUDA C++ and its cache, without a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("cuda.core")
from torchstorm import nvrtc
from torchstorm.errors import KernelError
from torchstorm.nvrtc import Source, arch_of, cache_folder, compile_source, cubin_of


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "double_it.cu").write_text('extern "C" __global__ void double_it(Number* x) { x[threadIdx.x] *= 2; }\n')
    files = (tmp_path / "types.cuh", tmp_path / "double_it.cu")
    return Source(kernel="double_it", files=files)


def with_type(source: Source, size: int) -> Source:
    (source.files[0]).write_text(f"using Number = {'float' if size == 4 else 'double'};\n")
    return source


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were really compiled."""
    found: list[str] = []

    def compile_and_tell(source: Source, arch: str) -> nvrtc.Compiled:
        found.append(f"{source.kernel} {arch}")
        return compile_source(source, arch)

    monkeypatch.setattr(nvrtc, "compile_source", compile_and_tell)
    return found


def test_a_cubin_is_kept_and_found_again(source: Source, compiled: list[str]) -> None:
    first = cubin_of(with_type(source, 4), "sm_80")
    assert first.startswith(b"\x7fELF")
    assert cubin_of(source, "sm_80") == first
    assert compiled == ["double_it sm_80"]
    assert [path.suffix for path in cache_folder().iterdir()] == [".cubin"]


def test_another_source_architecture_or_option_is_another_cubin(source: Source, compiled: list[str]) -> None:
    made = [
        cubin_of(with_type(source, 4), "sm_80"),
        cubin_of(source, "sm_90a"),
        cubin_of(with_type(source, 8), "sm_80"),
    ]
    other = Source(kernel=source.kernel, files=source.files, defines=(("UNUSED", 1),))
    cubin_of(other, "sm_80")
    assert len(compiled) == 4
    assert len(set(made)) == 3


@pytest.mark.parametrize("damage", [lambda x: x[:100], lambda x: x[:-1] + bytes([x[-1] ^ 1]), lambda x: b""])
def test_a_damaged_file_is_made_anew(source: Source, compiled: list[str], damage: object) -> None:
    first = cubin_of(with_type(source, 4), "sm_80")
    (path,) = cache_folder().iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))  # type: ignore[operator]
    assert cubin_of(source, "sm_80") == first
    assert len(compiled) == 2
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_made_is_done_without(source: Source, compiled: list[str]) -> None:
    cache_folder().parent.mkdir(parents=True)
    cache_folder().write_text("a file is in its place")
    assert cubin_of(with_type(source, 4), "sm_80") == cubin_of(source, "sm_80")
    assert len(compiled) == 2


def test_what_the_compiler_refuses_is_told_with_file_line_and_log(source: Source) -> None:
    source.files[1].write_text('\n\nextern "C" __global__ void double_it(Number* x) { y = 2; }\n')
    with pytest.raises(
        KernelError, match=r"double_it of double_it.cu .* does not compile for sm_80 by NVRTC \d+\.\d+"
    ) as raised:
        compile_source(with_type(source, 4), "sm_80")
    assert 'double_it.cu(3): error: identifier "y" is undefined' in str(raised.value)


def test_headers_that_do_not_go_together_are_told_with_what_brings_others(source: Source, tmp_path: Path) -> None:
    (tmp_path / "theirs.h").write_text("#error too new\n")
    source.files[1].write_text('#include "theirs.h"\n')
    theirs = dataclasses.replace(
        with_type(source, 4), includes=(tmp_path,), headers="theirs 13.3", advice="pip install older"
    )
    with pytest.raises(
        KernelError, match=r"NVRTC \d+\.\d+, with the headers of theirs 13\.3\. pip install older:\n(.|\n)*too new"
    ):
        compile_source(theirs, "sm_80")


def test_registers_and_spills_are_in_the_log(source: Source) -> None:
    assert "registers" in compile_source(with_type(source, 4), "sm_80").log


def test_gpus_from_hopper_on_are_compiled_for_as_they_are() -> None:
    assert [arch_of(x) for x in ((8, 0), (8, 9), (9, 0), (10, 0))] == ["sm_80", "sm_89", "sm_90a", "sm_100a"]


def test_without_a_cache_of_its_own_the_user_has_one_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home-of-nobody")
    assert cache_folder() == Path("/home-of-nobody/.cache/torchstorm/cubins")


def test_auto_does_without_where_the_compiler_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvrtc.is_usable()

    def fail() -> str:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "compiler_version", fail)
    assert not nvrtc.is_usable.__wrapped__()
    monkeypatch.setattr(nvrtc, "import_module", fail)
    assert not nvrtc.is_usable.__wrapped__()
