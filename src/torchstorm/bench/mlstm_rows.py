"""Rows of the mLSTM's benchmark: the times of one implementation at one shape, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from torchstorm.bench.record import RecordRow


@dataclass(frozen=True, kw_only=True)
class MLSTMRow(RecordRow):
    """One implementation at one shape. Fields are None if not measured or if the check failed; `note` has the reason.

    Attributes:
        shape: "8x16x8192 128/256": B x H x S and d_qk / d_v.
        variant: a variant of `mlstm`, an intermediate development step, or the peer.
        dtype: of inputs and outputs.
        fwd_ms, fwdbwd_ms: median milliseconds of forward without gradients, and of forward and backward.
        fwd_range_ms, fwdbwd_range_ms: the fastest and the slowest of the same runs, at least five.
        tflops: TFLOP/s of the matrix products, in the longer of both passes.
        gb_per_s: GB/s if all inputs and results were moved once, in the longer of both passes.
        error: of the outputs, against float64; None where they are not finite.
        gradient_error: of the worst gradient; `gradient` names it.
        allowed, gradient_allowed: what they may be.
        over_first: how many times as fast as the first way here that computes the whole mLSTM, in the longer.
        best_known_ms: forward, and forward and backward, of the fastest that is known on an H200.
        peer: the same two of the peer, in this run, whatever its check said.
        checked: whether nothing was further off than allowed.
        note: what else is to be said.
    """

    shape: str
    variant: str
    dtype: str
    fwd_ms: float | None = None
    fwdbwd_ms: float | None = None
    fwd_range_ms: tuple[float, float] | None = None
    fwdbwd_range_ms: tuple[float, float] | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    error: float | None = None
    allowed: float | None = None
    gradient: str = ""
    gradient_error: float | None = None
    gradient_allowed: float | None = None
    over_first: float | None = None
    best_known_ms: tuple[float, float] | None = None
    peer: tuple[float | None, float | None] | None = None
    checked: bool = False
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The key that identifies the row in a file."""
        return (self.shape, self.variant, self.dtype)


HEADER = (
    f"{'variant':<31}{'forward':>12}{'with backward':>15}{'TFLOP/s':>9}{'GB/s':>9}{'x first':>9}{'error':>10}"
    f"{'gradients':>14}"
)


def format_row(row: MLSTMRow) -> str:
    """One line of the table under `HEADER`."""

    def cell(value: float | None, form: str, width: int, unit: str = "") -> str:
        return f"{'-' if value is None else format(value, form) + unit:>{width}}"

    gradient = "-" if row.gradient_error is None else f"{row.gradient_error:.1e} {row.gradient}"
    return (
        f"{row.variant:<31}{cell(row.fwd_ms, '.4g', 12, ' ms')}{cell(row.fwdbwd_ms, '.4g', 15, ' ms')}"
        f"{cell(row.tflops, '.3g', 9)}{cell(row.gb_per_s, '.3g', 9)}{cell(row.over_first, '.3g', 9)}"
        f"{cell(row.error, '.1e', 10)}{gradient:>14}  {'checked' if row.checked else 'NOT CHECKED'}"
        f"{'; ' if row.note else ''}{row.note}"
    )
