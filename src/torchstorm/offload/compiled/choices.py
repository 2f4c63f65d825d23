"""Whether other variants are chosen for compiled blocks, and whether they turned out to be worth it."""

from __future__ import annotations

from torchstorm.offload.replan.planned import NOISE, Kind
from torchstorm.plan.choose import Choice

_MOST_CHOICES = 4
# Of a step's time that other variants must promise. Where one is compiled first, that takes many seconds; else a step
# without a plan, and a quick one for the next.
_GAIN, _GAIN_AT_ONCE = 0.03, 0.005


class Choices:
    """The choices of one model's blocks, one after the other."""

    def __init__(self) -> None:
        self._num = self._num_urgent = 0
        self._has_waited = False  # for a step that compiles nothing: once, since some models compile in every step
        self._before: tuple[dict[str, str], Kind, float] | None = None  # variants, kind and seconds of a step in them

    @property
    def is_first(self) -> bool:
        """Whether there was one so far."""
        return self._num + self._num_urgent == 1

    def begin(self, *, has_compiled: bool, most: int | None = None, is_urgent: bool = False) -> bool:
        """Whether variants are to be chosen by a step that waits for them; counts that, if they are.

        Args:
            has_compiled: as in `may_begin`.
            most: so many choices at most; None for no other limit than there is.
            is_urgent: whether the present ones do not fit: these choices count by themselves.
        """
        if is_urgent:
            self._num_urgent += 1
            return self._num_urgent <= _MOST_CHOICES
        is_enough = most is not None and self._num + self._num_urgent >= most
        if is_enough or not self.may_begin(has_compiled=has_compiled):
            return False
        self.count()
        return True

    def may_begin(self, *, has_compiled: bool) -> bool:
        """Whether variants are to be chosen by a step beside training. The answer counts: where sizes change, longer
        steps may be planned meanwhile, and nobody waits for it any more.

        Args:
            has_compiled: whether the step has compiled anything, so that its times tell little.
        """
        if self._num >= _MOST_CHOICES:
            return False
        if has_compiled and not self._has_waited:
            self._has_waited = True
            return False
        return True

    def count(self) -> None:
        """Variants were chosen."""
        self._num += 1

    def is_worth(self, choice: Choice, *, compiles: bool) -> bool:
        """Whether variants promise to be faster by a share that is worth it, or are the only ones that fit.

        Args:
            choice: of the variants.
            compiles: whether some of them are compiled first.
        """
        if choice.step_ms is None or choice.measured_ms is None:
            return choice.measured_ms is None  # what the step was measured in does not fit
        return choice.step_ms < choice.measured_ms * (1 - (_GAIN if compiles else _GAIN_AT_ONCE))

    def take(self, before: dict[str, str], kind: Kind, took_s: float | None) -> None:
        """Variants are in force that were chosen by settled steps.

        Args:
            before: the variants until now.
            kind: of the steps.
            took_s: seconds of such a step in those; None where that is not known.
        """
        self._before = (before, kind, took_s) if took_s is not None else None

    def back(self, kind: Kind, took_s: float) -> dict[str, str] | None:
        """The variants before, if such steps in the present ones take longer, whatever was forecast; else None. Asked
        once of the same steps, and no other variants are chosen after it has said so but where nothing fits.

        Args:
            kind: of settled steps. Those of a kind that is older than the choice tell nothing of it.
            took_s: seconds of one.
        """
        if self._before is None:
            return None
        before, earlier, before_s = self._before
        if kind is earlier or kind.key != earlier.key:
            return None
        self._before = None
        if took_s <= before_s * (1 + NOISE):
            return None
        self._num = _MOST_CHOICES
        return before
