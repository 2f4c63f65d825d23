"""The one rule for how far a computed tensor may be from the truth.

Its error against float64 may be at most twice that of the worst of some yardsticks, which compute the same plainly in
the same dtype; or, where those happen to be exact, what rounding the result alone brings.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

TIMES = 2.0


def error_of(out: Tensor, truth: Tensor, *, scale: float = 0.0) -> float:
    """|out - truth| / max(|truth|, scale), by the norm over all elements; infinite where `out` is not finite.

    `scale` is for results in which larger terms cancel: the norm of those terms. Where the truth is beyond what out's
    dtype can hold, `out` must be nearly the largest number (or infinite, as yardsticks are), and the element counts no
    further. What is smaller than that dtype's normal numbers counts as 0, as GPUs take it.
    """
    out, truth = _within_range(out, truth)
    if not out.isfinite().all():
        return float("inf")
    distance = float((out - truth).norm())
    size = max(float(truth.norm()), scale)
    return distance / size if size else (float("inf") if distance else 0.0)


def assert_close(
    out: Tensor,
    truth: Tensor,
    *yardsticks: Tensor,
    floor: float | None = None,
    scale: float = 0.0,
    name: str = "the result",
) -> None:
    """Fails where `out` is not finite, or further from `truth` than the rule allows.

    Args:
        out: what was computed.
        truth: the same in float64.
        yardsticks: the same, computed plainly in out's dtype. Those that are not finite do not count.
        floor: error that is allowed whatever the yardsticks say; None for the dtype's epsilon.
        scale: as for `error_of`.
        name: of the result, for the message.
    """
    assert out.shape == truth.shape, f"{name} is {tuple(out.shape)}, but must be {tuple(truth.shape)}"
    assert truth.isfinite().all(), f"the truth of {name} is not finite"
    finite = out.isfinite()
    assert finite.all(), f"{name}: {int((~finite).sum())} of {out.numel()} elements are NaN or infinite"
    error = error_of(out, truth, scale=scale)
    theirs = [error_of(yardstick, truth, scale=scale) for yardstick in yardsticks]
    least = torch.finfo(out.dtype).eps if floor is None else floor
    allowed = max([least, *(TIMES * their for their in theirs if their < float("inf"))])
    assert error <= allowed, (
        f"{name}: error {error:.2e}, allowed {allowed:.2e}, yardsticks {[f'{e:.2e}' for e in theirs]}"
    )


def _within_range(out: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, zeros where the truth is beyond out's dtype and `out` says so, and for subnormal numbers."""
    dtype, most = out.dtype, torch.finfo(out.dtype).max
    out, truth = out.double(), truth.double()
    beyond = (truth.abs() > 0.99 * most) & (out * truth.sign() > 0.95 * most)
    least = torch.finfo(dtype).tiny
    return tuple(x.masked_fill(beyond | (x.abs() < least), 0.0) for x in (out, truth))  # type: ignore[return-value]


def assert_all_close(
    out: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    *yardsticks: Mapping[str, Tensor],
    floor: float | None = None,
    scales: Mapping[str, float] | None = None,
) -> None:
    """`assert_close` for each named tensor."""
    assert out.keys() == truth.keys()
    for name in truth:
        theirs = [yardstick[name] for yardstick in yardsticks]
        assert_close(out[name], truth[name], *theirs, floor=floor, scale=(scales or {}).get(name, 0.0), name=name)
