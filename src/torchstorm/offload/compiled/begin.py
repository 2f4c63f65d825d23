"""Begins to run the blocks of a Session's model compiled."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from torchstorm.errors import ConfigError
from torchstorm.offload.compiled.agreement import REFERENCE
from torchstorm.offload.compiled.call import refuse_compiled_whole
from torchstorm.offload.compiled.compile import CompiledBlocks
from torchstorm.offload.step.hooks import SavedTensors
from torchstorm.plan.variants import LEAST, SAVE


def compile_blocks(
    saved: SavedTensors,
    model: nn.Module,
    asked: nn.Module | None,
    blocks: Iterable[nn.Module | str] | None,
    variant: str | None,
    *,
    unlimited: bool,
    can_move: bool,
) -> CompiledBlocks:
    """What `Session.compile` does, with its arguments.

    Args:
        saved: the Session's; it learns which block is running.
        model: the Session's.
        asked: the model that the user named, None for the Session's.
        blocks: see `CompiledBlocks`.
        variant: for all blocks and all steps; None lets the Session choose after its first steps.
        unlimited: whether there is nothing to choose for: blocks save what PyTorch would.
        can_move: whether what they save can go anywhere. Else only a variant that saves little keeps a budget in steps
            that were never seen.

    Raises:
        ConfigError: another model than the Session's was named; or as `CompiledBlocks` raises.
        UnsupportedError: as `CompiledBlocks` raises.
    """
    if asked is not None and asked is not model:
        refuse_compiled_whole(asked)
        raise ConfigError(
            f"compile({type(asked).__name__}) was given, but this Session trains another model "
            f"({type(model).__name__}): call compile() without one, or make a Session for the other."
        )
    reference = REFERENCE if can_move else LEAST
    compiled = CompiledBlocks(
        model,
        blocks,
        variant=variant or (SAVE if unlimited else reference),
        reference=reference,
        on_enter=lambda name: saved.blocks.append(name),
        on_leave=lambda: saved.blocks.pop() if saved.blocks else None,
    )
    compiled.fixed = unlimited or variant is not None
    compiled.compares = variant is None
    return compiled
