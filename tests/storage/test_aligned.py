import ctypes
import gc
import mmap
import weakref

import pytest
import torch

from torchstorm.storage import aligned
from torchstorm.storage.aligned import AlignedPool, aligned_empty, byte_view, bytes_beyond, direct_alignment


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 2**21 + 1])
def test_storage_is_exact_and_starts_on_a_page(nbytes: int) -> None:
    tensor = aligned_empty(nbytes)
    assert tensor.shape == (nbytes,)
    assert tensor.dtype == torch.uint8
    assert tensor.untyped_storage().nbytes() == nbytes
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    assert not tensor.any()


def test_the_rest_of_the_last_page_is_known_only_at_the_end_of_the_data() -> None:
    tensor = aligned_empty(5000)
    end = tensor.data_ptr() + 5000
    assert bytes_beyond(end) == 2 * 4096 - 5000
    assert bytes_beyond(end - 1) == bytes_beyond(end + 1) == bytes_beyond(tensor.data_ptr() + 4096) == 0
    whole_pages = aligned_empty(8192)
    assert bytes_beyond(whole_pages.data_ptr() + 8192) == 0


def test_memory_goes_with_the_last_tensor() -> None:
    tensor = aligned_empty(5000)
    end = tensor.data_ptr() + 5000
    mapping = weakref.ref(aligned._aligned_ends[end])
    view = tensor[100:]
    del tensor
    assert bytes_beyond(end) == 3192
    del view
    gc.collect()
    assert mapping() is None
    assert bytes_beyond(end) == 0


def test_a_byte_view_is_the_memory_itself() -> None:
    tensor = torch.zeros(3, dtype=torch.int32)
    byte_view(tensor)[4] = 7
    assert tensor.tolist() == [0, 7, 0]


def test_no_alignment_where_the_kernel_tells_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert direct_alignment(-1) == (0, 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # a C library without statx
    assert direct_alignment(0) == (0, 0)


def test_a_pool_gives_memory_again_that_nobody_holds_and_never_what_somebody_does() -> None:
    pool = AlignedPool(3 * mmap.PAGESIZE + 5, most=2)
    first, second = pool.take(), pool.take()
    assert first.data_ptr() % mmap.PAGESIZE == 0
    assert first.nbytes == 3 * mmap.PAGESIZE + 5
    assert first.data_ptr() != second.data_ptr()
    address, view = first.data_ptr(), first[7:9]
    del first
    assert pool.take().data_ptr() != address  # a view is held
    del view
    assert pool.take().data_ptr() == address


def test_a_pool_keeps_no_more_than_it_may_and_outlives_nobody() -> None:
    pool = AlignedPool(2**20, most=1)
    held = [pool.take() for _ in range(4)]
    held[3].fill_(7)
    last = held.pop()
    held.clear()
    assert len(pool._free) == 1
    del pool
    gc.collect()
    assert (last == 7).all()
    assert AlignedPool(0, most=1).take().nbytes == 0
