"""Whether other variants are chosen for compiled blocks, and whether they turned out to be worth it."""

from __future__ import annotations

from torchstorm.plan.variants import Choice

_MOST_CHOICES = 4
_GAIN = 0.03  # of a step's time that other variants must promise, since each is compiled first
_NOISE = 0.02  # of a step's time


class Choices:
    """The choices of one model's blocks, one after the other.

    Attributes:
        num: so many were made.
    """

    def __init__(self) -> None:
        self.num = 0
        self._has_waited = False  # for a step that compiles nothing: once, since some models compile in every step
        self._before: tuple[dict[str, str], float] | None = None  # the variants before, and seconds of a step in them

    def is_due(self, *, has_compiled: bool, most: int | None = None) -> bool:
        """Whether variants are to be chosen by a step.

        Args:
            has_compiled: whether the step has compiled anything, so that its times tell little.
            most: so many choices at most; None for no other limit than there is.
        """
        if self.num >= min(_MOST_CHOICES if most is None else most, _MOST_CHOICES):
            return False
        if has_compiled and not self._has_waited:
            self._has_waited = True
            return False
        return True

    def is_worth(self, choice: Choice) -> bool:
        """Whether variants promise to be faster by a share that is worth compiling them, or are the only ones that
        fit."""
        if choice.step_ms is None or choice.measured_ms is None:
            return choice.measured_ms is None  # what the step was measured in does not fit
        return choice.step_ms < choice.measured_ms * (1 - _GAIN)

    def take(self, before: dict[str, str], took_s: float | None) -> None:
        """Variants are in force that were chosen by settled steps.

        Args:
            before: the variants until now.
            took_s: seconds of a step in those; None where that is not known.
        """
        self._before = (before, took_s) if took_s is not None else None

    def back(self, took_s: float) -> dict[str, str] | None:
        """The variants before, if steps in the present ones take longer, whatever was forecast; else None. Asked once,
        and nothing is chosen after it has said so.

        Args:
            took_s: seconds of a settled step.
        """
        before, self._before = self._before, None
        if before is None or took_s <= before[1] * (1 + _NOISE):
            return None
        self.num = _MOST_CHOICES
        return before[0]
