"""Finds a model's repeated blocks by structure, whatever they are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from torchstorm.errors import ConfigError
from torchstorm.offload import torch_private as private
from torchstorm.offload.native.library import library

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they hold modules and compute nothing
_CHAINS = (nn.Sequential, *_CONTAINERS)

Signature = tuple[object, ...]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of a deep network's main stem: layers of a transformer, residual blocks of a convolutional network.

    Blocks are siblings of one class that have children of their own and parameters. Siblings need not be equal
    (a residual network's first block of a stage differs from the others); `structure` tells which ones are. Where
    siblings are themselves made of such repeated blocks (the stages or towers of some networks), the inner ones count,
    unless those are shallow, as a mixture's experts are.

    Args:
        model: any module.

    Returns:
        The blocks in the order in which the model names them, each once; empty where there are none.
    """
    return list(dict.fromkeys(_blocks_in(model)))


def named_blocks(model: nn.Module, blocks: Iterable[nn.Module | str] | None = None) -> dict[str, nn.Module]:
    """Blocks by their dotted names in `model`.

    Args:
        model: whose blocks.
        blocks: the ones that the user wants, as modules of the model or by name; None for `repeated_blocks`.

    Raises:
        ConfigError: one is no module of the model, or lies within another one.
    """
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        names.setdefault(module, name)
    modules = {name: module for module, name in names.items()}
    found: dict[str, nn.Module] = {}
    for block in repeated_blocks(model) if blocks is None else blocks:
        name = block if isinstance(block, str) else names.get(block, "")
        if not name or name not in modules:
            what = f"{block!r}" if isinstance(block, str) else f"this {type(block).__name__}"
            raise ConfigError(
                f"blocks= names {what}, which is no module inside the {type(model).__name__} that this Session trains. "
                f"Its first modules are {', '.join(repr(known) for known in list(modules)[1:6])}."
            )
        found[name] = modules[name]
    for name in found:
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(f"blocks= names {name!r}, which lies within the block {outer!r}: name one of the two.")
    return found


def structure(module: nn.Module) -> Signature:
    """What two modules share when they are built alike: classes, and shapes of all parameters and buffers."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    tensors = tuple((name, tuple(value.shape), value.dtype, value.requires_grad) for name, value in own)
    return (type(module), tensors, tuple((name, structure(child)) for name, child in module.named_children()))


def _blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    """Blocks among a module's descendants."""
    children = list(dict.fromkeys(module.children()))
    for child in children:
        inner = list(_blocks_in(child))
        is_repeated = sum(type(other) is type(child) for other in children) > 1
        is_made_of_blocks = isinstance(child, _CHAINS) or all(_depth(block) > 1 for block in inner)
        if is_repeated and _can_be_a_block(child) and not (inner and is_made_of_blocks):
            yield child
        else:
            yield from inner


def _can_be_a_block(module: nn.Module) -> bool:
    return (
        not isinstance(module, _CONTAINERS)
        and _depth(module) > 0
        and any(isinstance(tensor, torch.Tensor) for tensor in module.parameters())
    )


def _depth(module: nn.Module) -> int:
    return 1 + max((_depth(child) for child in module.children()), default=-1)


def hooks_on(module: nn.Module) -> tuple[int, ...]:
    """What tells the hooks on a module and within it from all others that there were. Each call of a block asks."""
    found = library()
    return private.hook_numbers(module) if found is None or found.may_have_hooks(module) else ()
