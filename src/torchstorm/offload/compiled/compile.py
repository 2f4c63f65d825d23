"""A model compiled block by block, each block in a variant that can be changed from step to step.

Blocks that are built alike share one compilation a variant: `torch.compile` sees one function, which takes the block as
an argument. Variants are compiled so as to give the same bits (see `torch_private.compile_with`), and a plan mixes
those that a comparison between steps has found to do so (see `agreement`).

Graph breaks are tolerated: what lies between the graphs runs uncompiled, and its saved tensors are planned one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torchstorm.errors import ConfigError, UnsupportedError
from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled.agreement import REFERENCE, look_of
from torchstorm.offload.compiled.blocks import hooks_on, named_blocks, structure
from torchstorm.offload.compiled.call import BlockCall, Captured, is_ours, refuse_compiled_whole
from torchstorm.offload.compiled.choices import Choices
from torchstorm.offload.compiled.kind import WITHOUT_GRADIENTS, Kind
from torchstorm.offload.compiled.loss import compiled_losses
from torchstorm.offload.fast import FastTier
from torchstorm.offload.replan.planned import Kind as StepKind
from torchstorm.plan.choose import Blocks, Choice, choose_variants
from torchstorm.plan.plan import Plan
from torchstorm.plan.trace import Trace
from torchstorm.plan.typical import without_compilation
from torchstorm.plan.variants import CHEAP, VARIANTS, BlockTable
from torchstorm.sizes import format_size

# Bytes per second that element-wise kernels write, roughly: only a share of the small difference between variants
# depends on it.
_MEMORY_BYTES_PER_S = {"cuda": 1.5e12, "cpu": 5e9}

_SEARCH_S, _LATER_S = 5.0, 1.0  # of the search for the first choice and for later ones, while a step waits


class CompiledBlocks:
    """The compiled blocks of a model.

    Calls of each block go through torch.compile from now on, as after `block.compile()`, and so do those of the model's
    own loss function, if it has one (see `loss`); `undo` takes that back.
    Parameters, names and state dict stay what they are.

    Args:
        model: whose blocks are compiled; a block that is compiled already is compiled anew.
        blocks: the blocks, as modules of the model or by dotted name; None finds the repeated ones by structure.
        variant: in which they begin, one of `plan.variants.VARIANTS`.
        reference: in which calls run whose specialization was not compared yet, and what is compared with.
        on_enter: told a block's name when it is called.
        on_leave: told that it has returned or raised.

    Raises:
        ConfigError: there is no such variant, a block is no module of the model, or no repeated block was found.
        UnsupportedError: the model is compiled as a whole.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module | str] | None = None,
        *,
        variant: str = CHEAP,
        reference: str = REFERENCE,
        on_enter: Callable[[str], object] = lambda name: None,
        on_leave: Callable[[], object] = lambda: None,
    ) -> None:
        refuse_compiled_whole(model)
        self._modules = named_blocks(model, blocks)
        if not self._modules:
            raise ConfigError(
                f"No repeated blocks were found in {type(model).__name__}: no two sibling modules of one class have "
                'children and parameters. Name what is to be compiled: compile(blocks=["encoder", "decoder"]).'
            )
        self._alike: dict[object, Kind] = {}
        self._structures = {name: structure(module) for name, module in self._modules.items()}
        self._reference = reference
        self._without_hooks = {
            name: self._alike.setdefault(found, Kind(reference)) for name, found in self._structures.items()
        }
        self._kinds = dict(self._without_hooks)
        self.fixed = False  # whether `rechoose` leaves the variants as they are
        self.compares = False  # whether only variants are used that agree
        self.has_room = True  # whether blocks may be run by themselves now, to be compared and timed
        self._lacked_room = False  # whether variants were left out for that
        self._captured = Captured()
        self.are_whole = False  # whether steps have shown that nothing runs uncompiled within blocks
        self._fell_back = False  # whether a call of this step ran in another variant than was set
        self._is_settled = False  # whether all variants in use were compared when `settle` looked last
        self._num_before = 0  # graphs compiled before the step
        self._has_compiled = False  # whether the last step has compiled any
        self._choices = Choices()
        self.choice: Choice | None = None
        self.variants: dict[str, str] = {}
        self.set(dict.fromkeys(self._modules, variant))
        # Dynamo compiles once a variant what a graph break leaves, and once a block where their code reads a number in
        # which they differ.
        private.allow_recompiles(len(VARIANTS) * len(self._modules))
        self._losses = compiled_losses(model, self._captured)
        for name, module in self._modules.items():
            call = BlockCall(name, module, self.call, self._captured, on_enter=on_enter, on_leave=on_leave)
            private.set_call(module, call)

    # ------------------------------------------------------------------ variants

    def set(self, variants: Mapping[str, str]) -> None:
        """From the next call on, the named blocks run in those variants.

        Raises:
            ConfigError: a block or a variant that does not exist.
        """
        for name, variant in variants.items():
            if variant not in VARIANTS:
                raise ConfigError(f"variant={variant!r} does not exist; there are {', '.join(VARIANTS)}.")
            if name not in self._modules:
                raise ConfigError(f"{name!r} is no compiled block; there are {', '.join(self._modules)}.")
        self.variants.update(variants)
        self._is_settled = False

    @property
    def num_compiled(self) -> int:
        """How many graphs calls of blocks and loss functions have compiled."""
        return self._captured.num_graphs

    @property
    def has_breaks(self) -> bool:
        """Whether anything ran uncompiled within blocks."""
        return self._captured.has_breaks

    def tables(self) -> list[BlockTable]:
        """What every block that has run with gradients saves in every variant, in the order of the model's modules."""
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(self._kinds.values()))}
        return [
            BlockTable(name=name, variants=kind.usable(), forward_flops=kind.forward_flops, kind=numbers[kind])
            for name, kind in self._kinds.items()
            if kind.costs
        ]

    def timed(self, trace: Trace, fast: FastTier) -> Trace:
        """The trace of a step that has ended, with what its blocks take the device by themselves."""
        for kind in set(self._kinds.values()) if self.has_room else ():
            kind.time(fast)
        ran_once = {name for name, kind in self._kinds.items() if kind.ran_once(name)}
        blocks = self._blocks(trace)
        found = blocks.timed_alone(trace, ran_once)
        are_all_known = {table.name for table in blocks.tables} <= {name for name, _ in found.blocks_s}
        return without_compilation(found) if self._has_compiled and are_all_known else found

    @property
    def needed_bytes(self) -> int:
        """What a block takes at most, roughly, when it is compared or timed by itself."""
        return max((kind.needed_bytes for kind in self._alike.values()), default=0)

    @property
    def is_to_compare(self) -> bool:
        """Whether variants in use, or what the step that has ended was the first to run, were not compared."""
        return (
            not self._is_settled or self._fell_back or any(kind.agreement.is_to_settle for kind in self._alike.values())
        )

    @property
    def _is_disturbed(self) -> bool:
        """Whether the last step's times tell little, since it has compiled, and blocks were not timed by themselves."""
        return self._has_compiled and not self.is_timed

    @property
    def is_timed(self) -> bool:
        """Whether all blocks were timed by themselves, for the sizes that were compiled last."""
        return all(kind.is_timed for kind in self._kinds.values())

    def _blocks(self, trace: Trace) -> Blocks:
        speed = _MEMORY_BYTES_PER_S[trace.device]
        return Blocks(tables=self.tables(), measured=dict(self.variants), memory_bytes_per_s=speed)

    def to_choose(self, trace: Trace) -> Blocks | None:
        """The blocks, if variants are to be chosen for them beside training; `take` says what becomes of the choice.

        Args:
            trace: a settled step in the present ones.
        """
        if self.fixed or not self.tables() or not self._choices.may_begin(has_compiled=self._is_disturbed):
            return None
        return self._blocks(trace)

    def take(self, choice: Choice, kind: StepKind, took_s: float | None) -> bool | None:
        """Sets variants that were chosen beside training, where they are worth it; so it must be between steps.

        Args:
            choice: of these.
            kind: of the steps by which they were chosen.
            took_s: seconds of such a step in the present ones; None where that is not known.

        Returns:
            Whether blocks change, so that the next step is another one. None where some of the variants do not agree
            with the reference: they are left out from now on, and others may be worth it.
        """
        self._choices.count()
        before = dict(self.variants)
        if choice.measured_ms is None or not self._is_worth(choice) or before | choice.variants == before:
            return False  # of the present ones, which steps follow a plan in, it is known that they fit
        if self._compiles(choice) and self._lacks_room():
            return False
        if not self.adopt(choice.variants):
            self.set(before)
            return None
        self.choice = choice
        self._choices.take(before, kind, took_s)
        return True

    def _is_worth(self, choice: Choice) -> bool:
        return self._choices.is_worth(choice, compiles=self._compiles(choice))

    def _compiles(self, choice: Choice) -> bool:
        return not all(self._was_compared(name, variant) for name, variant in choice.variants.items())

    def go_back(self, kind: StepKind, took_s: float) -> bool:
        """Sets the variants of before the last choice, if settled steps of a kind, which take so many seconds now, took
        less in them; returns whether they did."""
        if (before := self._choices.back(kind, took_s)) is not None:
            self.set(before)
        return before is not None

    def rechoose(
        self,
        trace: Trace,
        plan_of: Callable[[Trace], Plan | None],
        *,
        most: int | None = None,
        is_urgent: bool = False,
    ) -> bool:
        """Chooses from a step in the present variants. True where blocks change, so that the next step is another one.

        Args:
            trace: the step; its storages' blocks are named as here.
            plan_of: plans a trace within the budget; None or BudgetError where that is impossible.
            most: does so only if fewer choices have been made so far. After the first one, other variants must promise
                to be faster by a share that is worth compiling them, or be the only ones that fit.
            is_urgent: whether the present ones do not fit. Else the first step that has compiled anything chooses
                nothing by its times, unless blocks were timed by themselves.
        """
        if self.fixed or not self.tables() or self._lacks_room():
            return False
        if not self._choices.begin(most=most, has_compiled=self._is_disturbed, is_urgent=is_urgent):
            return False
        before = dict(self.variants)
        while True:
            limit_s = _SEARCH_S if self._choices.is_first else _LATER_S
            found = choose_variants(trace, self._blocks(trace), plan_of, max_seconds=limit_s)
            if not self._choices.is_first and not self._is_worth(found):
                return False
            self.choice = found
            if self.adopt(found.variants):
                return before != self.variants
            self.set(before)  # which the trace is of; those that do not agree are left out from now on

    def adopt(self, variants: Mapping[str, str]) -> bool:
        """Sets those variants that agree with the reference; compares them, so it must be between steps.

        Returns:
            Whether all of them do. Those that do not are left out from now on, and `notes` says why.

        Raises:
            ConfigError: as `set` does.
        """
        agreed = {name: variant for name, variant in variants.items() if self._agrees(name, variant)}
        self.set(agreed)
        return len(agreed) == len(variants)

    def _lacks_room(self) -> bool:
        self._lacked_room = not self.has_room
        return self._lacked_room

    def step_ended(self) -> None:
        """Takes note of what has run in a step."""
        self._has_compiled, self._num_before = self.num_compiled != self._num_before, self.num_compiled
        for kind in self._alike.values():
            kind.step_ended()

    def settle(self) -> bool:
        """Compares what the step that has ended was the first to run. True where the next such step is another one."""
        if not self.is_to_compare:
            return False
        changed, self._fell_back, self._is_settled = self._fell_back, False, True
        for name, variant in list(self.variants.items()):
            if self.compares and not self._agrees(name, variant):
                self.variants[name] = self._reference
                changed = True
        for kind in self._alike.values():
            kind.agreement.settle()
        return changed

    def _agrees(self, name: str, variant: str) -> bool:
        kind = self._kinds.get(name)
        if not self.compares or kind is None or variant not in VARIANTS:
            return True  # `set` refuses it
        if not self._was_compared(name, variant) and self._lacks_room():
            return False
        device = next((one.device for one in self._modules[name].parameters()), torch.device("cpu"))
        return kind.agreement.agrees(variant, kind.call, device)

    def _was_compared(self, name: str, variant: str) -> bool:
        kind = self._kinds.get(name)
        return kind is not None and kind.agreement.was_compared(variant)

    def settle_whether_whole(self) -> bool:
        """Called when a step has ended. True where the next such step need not watch what blocks do, or must again."""
        before, have_run = self.are_whole, [kind for kind in self._alike.values() if kind.costs]
        self.are_whole = bool(have_run) and not self.has_breaks and all(len(kind.costs) == 1 for kind in have_run)
        return self.are_whole != before

    @property
    def mix(self) -> str:
        """How many blocks run in which variant."""
        counts = Counter(self.variants.values())
        mix = (f"{counts[variant]} {variant!r}" for variant in VARIANTS if counts[variant])
        return f"compiled blocks, by what they save: {', '.join(mix)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Variants that PyTorch could not make, so that those blocks save more instead; and those that are not used."""
        failed = {
            f"variant {variant!r} of {type(self._modules[name]).__name__}: {reason}"
            for name, kind in self._kinds.items()
            for costs in kind.costs
            for variant, reason in costs.failed.items()
        }
        names: dict[Kind, list[str]] = {}
        for name, kind in self._kinds.items():
            names.setdefault(kind, []).append(name)
        for kind, alike in names.items():
            for variant, reason in kind.agreement.dropped.items():
                failed.add(f"variant {variant!r} of {', '.join(alike)} is not used: {reason}")
        if self._lacked_room:
            needed = format_size(self.needed_bytes)
            failed.add(
                f"variants of compiled blocks were not compared, and are not used: the budget has no room for {needed}"
            )
        failed |= {f"the loss function runs uncompiled: {loss.failure}" for loss in self._losses if loss.failure}
        return tuple(sorted(failed))

    def _kind_of(self, name: str, module: nn.Module) -> Kind:
        """With hooks a block is of its own kind: Dynamo does not look at them when it takes one's code for another."""
        hooks = hooks_on(module)
        kind = self._without_hooks[name]
        if hooks:
            kind = self._alike.setdefault((self._structures[name], name, hooks), Kind(self._reference))
        self._kinds[name] = kind
        return kind

    def call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a block in its variant, or in the reference until they are known to agree for such calls."""
        kind = self._kind_of(name, module)
        kind.num_calls[name] += 1
        if not torch.is_grad_enabled():
            return kind.call(WITHOUT_GRADIENTS, module, args, kwargs)
        wanted = self.variants[name]
        if not self.compares:
            return kind.call(wanted, module, args, kwargs)
        key = look_of(name, module, (args, kwargs))
        variant = kind.agreement.variant(key, wanted)
        self._fell_back |= variant != wanted
        given = module, args, kwargs
        case = kind.agreement.freeze(key, given)
        before = private.num_compiled()
        out = kind.call(variant, module, args, kwargs)
        kind.agreement.ran(key, case, given, is_compiled=private.num_compiled() != before)
        return out

    def undo(self) -> None:
        """The blocks run uncompiled again, and so does the loss function."""
        for loss in self._losses:
            loss.undo()
        for module in self._modules.values():
            if is_ours(module):
                private.set_call(module, None)

    def __reduce__(self) -> str:
        raise UnsupportedError("Compiled blocks belong to one model in one process: compile the copy instead.")
