import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.noted import SeenOperations
from torchstorm.offload import first_calls
from torchstorm.offload.session import Session


def test_a_session_on_a_cpu_first_calls_each_function_of_mkl_with_one_element() -> None:
    first_calls.settle.cache_clear()
    with SeenOperations() as operations:
        Session(nn.Linear(2, 2), unlimited=True).close()
    for dtype in (torch.float32, torch.float64):
        for name in first_calls.NAMES:
            assert (f"aten.{name}.default", [((1,), (1,), dtype)]) in operations.seen


def test_a_second_session_calls_none_of_them_again() -> None:
    first_calls.settle()
    with SeenOperations() as operations:
        Session(nn.Linear(2, 2), unlimited=True).close()
    assert not {name for name, _ in operations.seen} & {f"aten.{name}.default" for name in first_calls.NAMES}


def test_the_names_are_all_that_this_pytorch_takes_from_mkl() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists() or not torch.backends.mkl.is_available():
        pytest.skip("this PyTorch has no MKL")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = {name.decode().lower() for name in re.findall(rb"\0vm[sd]([A-Z][A-Za-z0-9]*)(?=\0)", content)}
    if not found:
        pytest.skip("MKL is linked without the names of its functions")
    assert {"log" if name == "ln" else name for name in found} == set(first_calls.NAMES)
