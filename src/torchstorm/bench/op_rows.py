"""Rows of an operation's bench: what one way took for one pass at one shape, as a line of text and in a file."""

from __future__ import annotations

from dataclasses import dataclass

from torchstorm.bench.op_cases import Pass
from torchstorm.bench.record import RecordRow


@dataclass(frozen=True, kw_only=True)
class OpRow(RecordRow):
    """One pass of one way. A field is None where it was not measured, or where its check failed; `note` says why.

    Attributes:
        op, shape, dtype: of its case.
        variant: of ours, "reference" for plain PyTorch, or a peer's name.
        pass_: "forward", "backward" or "both"; "pass" in a file.
        ms, fastest_ms, slowest_ms: milliseconds of the device: the median of at least five runs, and their range.
        host_ms: of the host, to ask for it; None on a CPU.
        extra_bytes: most device memory in use beside the inputs, and before backward what forward kept; None on a CPU.
        rate: operations or bytes a second, as `unit` says, each byte counted once.
        unit: "FLOP/s" or "B/s".
        share_of_ceiling: of what this device was measured to do: a large product in that dtype, or a large copy.
        over_first: how many times as fast as the first of our variants that was timed.
        over_pytorch: how many times as fast as the reference.
        error: the worst of the outputs' (and for other passes than forward, the gradients'), against float64.
        where: the one that is worst.
        allowed: what that may be.
        checked: whether nothing was further off than allowed.
        note: what else is to be said.
    """

    op: str
    shape: str
    dtype: str
    variant: str
    pass_: Pass
    ms: float | None = None
    fastest_ms: float | None = None
    slowest_ms: float | None = None
    host_ms: float | None = None
    extra_bytes: int | None = None
    rate: float | None = None
    unit: str = ""
    share_of_ceiling: float | None = None
    over_first: float | None = None
    over_pytorch: float | None = None
    error: float | None = None
    where: str = ""
    allowed: float | None = None
    checked: bool = False
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What there is one row for in a file."""
        return (self.op, self.shape, self.dtype, self.variant, self.pass_)


HEADER = (
    f"{'variant':<20}{'pass':<10}{'time':>13}{'host':>12}{'rate':>16}{'of ceiling':>12}{'x first':>9}{'x PyTorch':>11}"
    f"{'memory':>12}{'error':>10}"
)


def format_row(row: OpRow) -> str:
    """One line of the table under `HEADER`."""

    def cell(value: float | None, form: str, width: int, unit: str = "") -> str:
        return f"{'-' if value is None else format(value, form) + unit:>{width}}"

    rate = None if row.rate is None else row.rate / 1e9
    extra = None if row.extra_bytes is None else row.extra_bytes / 2**20
    checked = ("checked" if row.checked else "NOT CHECKED") + ("; " if row.note else "")
    return (
        f"{row.variant:<20}{row.pass_:<10}{cell(row.ms, '.4g', 13, ' ms')}{cell(row.host_ms, '.2g', 12, ' ms')}"
        f"{cell(rate, '.0f', 16, ' G' + row.unit)}"
        f"{cell(row.share_of_ceiling, '.1%', 12)}{cell(row.over_first, '.3g', 9)}{cell(row.over_pytorch, '.3g', 11)}"
        f"{cell(extra, '.0f', 12, ' MiB')}{cell(row.error, '.1e', 10)}  {checked}{row.note}"
    )
