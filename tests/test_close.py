"""The tolerance rule lets pass what is as good as its yardsticks, and nothing else."""

from __future__ import annotations

import pytest
import torch

from close import assert_all_close, assert_close, error_of

TRUTH = torch.tensor([3.0, 4.0], dtype=torch.float64)


def off_by(relative: float) -> torch.Tensor:
    return TRUTH * (1 + relative)


def test_twice_the_worst_yardstick_passes_and_more_does_not() -> None:
    assert_close(off_by(1.9e-3), TRUTH, off_by(1e-5), off_by(1e-3))
    with pytest.raises(AssertionError, match=r"the sum: error 2\.10e-03, allowed 2\.00e-03"):
        assert_close(off_by(2.1e-3), TRUTH, off_by(1e-5), off_by(1e-3), name="the sum")


def test_without_an_inexact_yardstick_only_rounding_passes() -> None:
    assert_close((TRUTH / 7).float(), TRUTH / 7, TRUTH / 7)
    with pytest.raises(AssertionError):
        assert_close(off_by(3e-7).float(), TRUTH, TRUTH)
    assert_close(off_by(9e-4), TRUTH, floor=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_never_passes_and_never_excuses(bad: float) -> None:
    broken = torch.tensor([3.0, bad], dtype=torch.float64)
    with pytest.raises(AssertionError, match="NaN or infinite"):
        assert_close(broken, TRUTH, broken, floor=1e9)
    with pytest.raises(AssertionError, match="allowed"):
        assert_close(off_by(1e-2), TRUTH, broken)


def test_another_shape_never_passes() -> None:
    with pytest.raises(AssertionError, match=r"is \(1, 2\)"):
        assert_close(TRUTH[None], TRUTH, floor=1e9)


def test_zeros_must_be_zeros_unless_larger_terms_cancelled() -> None:
    zeros = torch.zeros(2, dtype=torch.float64)
    assert error_of(zeros, zeros) == 0.0
    with pytest.raises(AssertionError):
        assert_close(zeros + 1e-9, zeros)
    assert_close(zeros + 1e-9, zeros, scale=1.0, floor=1e-8)


def test_beyond_what_the_dtype_holds_it_must_be_at_the_end_and_finite() -> None:
    truth = torch.tensor([1e6, 1.0], dtype=torch.float64)
    assert_close(torch.tensor([65504.0, 1.0]).half(), truth)
    assert error_of(truth.half(), truth) == 0, "a yardstick may be infinite there"
    for wrong in ([torch.nan, 1.0], [torch.inf, 1.0], [-65504.0, 1.0], [10.0, 1.0], [torch.inf, torch.inf]):
        with pytest.raises(AssertionError):
            assert_close(torch.tensor(wrong).half(), truth)


def test_every_name_is_held_to_the_rule() -> None:
    assert_all_close({"a": TRUTH, "b": off_by(1e-3)}, {"a": TRUTH, "b": TRUTH}, {"a": TRUTH, "b": off_by(1e-3)})
    with pytest.raises(AssertionError, match="b: error"):
        assert_all_close({"a": TRUTH, "b": off_by(1e-2)}, {"a": TRUTH, "b": TRUTH}, {"a": TRUTH, "b": off_by(1e-3)})
    with pytest.raises(AssertionError):
        assert_all_close({"a": TRUTH}, {"a": TRUTH, "b": TRUTH})
