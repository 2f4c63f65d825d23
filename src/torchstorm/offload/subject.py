"""Tells whether a plan is for this model and batch: a plan of another one would move the wrong tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch.utils._pytree import tree_leaves

from torchstorm.errors import PlanError
from torchstorm.plan.plan import Plan, Subject


def subject_of(model: torch.nn.Module, inputs: Iterable[torch.Tensor] = ()) -> Subject:
    """What identifies a model, and the tensors that it is given.

    Args:
        model: any nn.Module.
        inputs: the tensors among the arguments of its forward, in order.
    """
    digest = hashlib.sha256()
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in sorted(named):
            digest.update(f"{kind} {name} {_shape(tensor)}\n".encode())
    return Subject(
        model=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        shapes_sha256=digest.hexdigest(),
        inputs=tuple(_shape(tensor) for tensor in inputs),
    )


def input_tensors(given: object) -> list[torch.Tensor]:
    """The tensors among a forward's arguments, in order."""
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def check_fits(plan: Plan, model: torch.nn.Module, inputs: Iterable[torch.Tensor] | None = None) -> None:
    """Makes sure that a plan is for this model.

    Args:
        plan: from a file, or made before. One that says nothing of its model passes: whether it fits then shows in the
            first step, which leaves a plan that is not its own.
        model: the one to train.
        inputs: the tensors that its forward is given; not compared where left out.

    Raises:
        PlanError: it is for another model, or for a batch of other shapes; says what differs.
    """
    planned = plan.subject
    if planned is None:
        return
    found = subject_of(model, inputs or ())
    way_out = "Make a plan for it with torchstorm.plan(model, batch, loss_fn, ...), or leave plan= out."
    if (planned.num_parameters, planned.shapes_sha256) != (found.num_parameters, found.shapes_sha256):
        differs = (
            f"{planned.num_parameters} parameters, this one {found.num_parameters}"
            if planned.num_parameters != found.num_parameters
            else f"{found.num_parameters} parameters of other names, shapes or types"
        )
        raise PlanError(
            f"This plan is for another model: {planned.model} with {differs} ({type(model).__name__}). {way_out}"
        )
    if inputs is not None and planned.inputs and planned.inputs != found.inputs:
        raise PlanError(
            f"This plan is for a batch of ({', '.join(planned.inputs)}), but {planned.model} was given "
            f"({', '.join(found.inputs)}). {way_out}"
        )


def _shape(tensor: torch.Tensor) -> str:
    sizes = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{sizes} {str(tensor.dtype).removeprefix('torch.')}"
