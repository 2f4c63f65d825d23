"""What torchstorm takes from inside PyTorch for compiled blocks and for recording operations, in one place.

Names with an underscore move between versions. These were tried on torch 2.11 and 2.13; what is newer than either is
asked for before it is used. `custom_partitioner_fn` is Inductor's own opening for a partition function (torch >= 2.9).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch._C import _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

Graphs = tuple[fx.GraphModule, fx.GraphModule]

# What Inductor's min-cut may do once these are off: compute again whatever is cheap, even where backward needs the
# whole tensor in memory. Random operations, reductions to few elements and all that it does not know stay saved.
_LIFTED = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}


def partition(joint: fx.GraphModule, inputs: Any, *, lift_bans: bool, again: set[str], **options: Any) -> Graphs:
    """Splits a joint graph into forward and backward by PyTorch's own min-cut.

    Args:
        joint: forward and backward in one graph; it is changed.
        inputs: as PyTorch gave them.
        lift_bans: whether cheap operations may run again where PyTorch would save what they made.
        again: names of nodes that must run again in backward; none of them draws random numbers.
        options: what else PyTorch gave.

    Raises:
        RuntimeError: PyTorch finds no cut.
    """
    from torch._functorch import config, partitioners
    from torch.utils.checkpoint import CheckpointPolicy

    # What a user's checkpoint within the graph draws is drawn again from a state that PyTorch carries; what runs again
    # here draws nothing.
    asks_for_states = partitioners.has_recomputable_rng_ops
    draws = asks_for_states(joint)
    for node in joint.graph.nodes:
        if node.name in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    partitioners.has_recomputable_rng_ops = lambda fx_g: draws
    try:
        with config.patch({"activation_memory_budget": 1.0, **(_LIFTED if lift_bans else {})}):
            return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)
    finally:
        partitioners.has_recomputable_rng_ops = asks_for_states


def copy_of(joint: fx.GraphModule) -> fx.GraphModule:
    """A joint graph that can be partitioned without changing the first one."""
    graph = fx.Graph()
    copied = graph.graph_copy(joint.graph, {}, return_output_node=True)
    assert isinstance(copied, tuple)
    values, output = copied
    graph.output(values).meta = dict(output.meta)
    return fx.GraphModule(joint, graph)


def compile_with(function: Callable[..., Any], partitioner: object, *, cache: bool) -> Callable[..., Any]:
    """`torch.compile` with a partition function, and with every low-precision operation rounded as in eager mode.

    Without that rounding a value that backward computes again inside a fused kernel keeps its float32 digits, where
    the saved one had lost them, and gradients in bfloat16 depend on what was saved.

    Args:
        function: what is compiled.
        partitioner: called with a joint graph, its inputs and what `partition` takes; gives forward and backward
            graph. Its method `uuid` tells it from others in Inductor's cache on disk.
        cache: whether Inductor may use what it compiled in an earlier run; the partitioner is not asked then.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    CustomPartitionerFn.register(type(partitioner))
    options: dict[str, Any] = {"custom_partitioner_fn": partitioner, **EXACT_OPTIONS}
    if not cache:
        options["fx_graph_cache"] = False
    return torch.compile(function, options=options)


EXACT_OPTIONS: dict[str, Any] = {"emulate_precision_casts": True, "cpp.simdlen": 1}
"""Inductor's options under which recomputed values have the bits of the saved ones.

On a CPU its own vectors are left out. What a kernel was fused of decides which of its loops run in vectors, and a
vector's exp() has other bits than the standard library's, a sum over lanes other ones than a sum in order.
"""


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module's call goes through torch.compile: it came from `torch.compile(module)`, or after
    `module.compile()`."""
    return type(module).__name__ == "OptimizedModule" or get_call(module) is not None


def set_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Makes calls of `module` go through `call`, as `module.compile()` does; None undoes it."""
    module._compiled_call_impl = call


def get_call(module: torch.nn.Module) -> object:
    """What `set_call` or `module.compile()` has set; None where nothing has."""
    return getattr(module, "_compiled_call_impl", None)


def hook_numbers(module: torch.nn.Module) -> tuple[int, ...]:
    """What tells the hooks on a module and within it from all others that there were."""
    found: list[int] = []
    waiting, seen = [module], {module}
    while waiting:  # `Module.modules` takes several times as long
        inner = waiting.pop()
        hooks = inner._forward_pre_hooks, inner._forward_hooks, inner._backward_pre_hooks, inner._backward_hooks
        if any(hooks):
            found += [number for kind in hooks for number in kind]
        for child in inner._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return tuple(found)


def allow_recompiles(num_more: int) -> None:
    """Lets Dynamo compile a function so many times more before it gives up and leaves it uncompiled."""
    from torch._dynamo import config

    config.recompile_limit += num_more
    config.accumulated_recompile_limit += num_more


def compiler_failures() -> type[Exception]:
    """What is raised where `torch.compile` fails, and where it meets in a function what raises."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def num_compiled() -> int:
    """How many graphs Dynamo has captured so far: a call that changes it was compiled."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters is None:
        return 0
    return int(counters["stats"]["unique_graphs"])


def num_breaks() -> int:
    """How often Dynamo has left something uncompiled in what it compiled so far."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return sum(counters["graph_break"].values()) if counters is not None else 0


# ---------------------------------------------------------------------- dispatch


def skip_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Dynamo leave a function alone, and all that it calls; `torch.compiler.disable` takes 10 us a call."""
    from torch._C._dynamo import eval_frame

    try:
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except AttributeError:
        disabled: Callable[..., Any] = torch.compiler.disable(function, recursive=True)
        return disabled
    return function


_eval_frame_callback: Callable[[], Any] = getattr(
    importlib.import_module("torch._C._dynamo.eval_frame"), "get_eval_frame_callback", lambda: None
)


def is_within_compiled() -> bool:
    """Whether a function that torch.compile compiles has called here, so that Dynamo compiles what is called next."""
    return _eval_frame_callback() not in (None, False)


def is_backward_compiled() -> bool:
    """Whether compiled autograd is enabled, which traces saved-tensor hooks as if they were the model's."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


@functools.cache
def pause_in_backward(kind: type[TorchDispatchMode | TorchFunctionMode]) -> None:
    """From now on, modes of a kind are left when backward begins, and entered again when it has ended.

    A dispatch mode is otherwise called for every operation of backward, which costs more than many of them take. Where
    PyTorch has another way into its engine, modes are called as before.
    """
    run_backward = getattr(torch.autograd, "_engine_run_backward", None)
    if run_backward is None:
        return
    current: Callable[[], Any] = _get_current_dispatch_mode
    if issubclass(kind, TorchFunctionMode):
        current = torch.overrides._get_current_function_mode

    @functools.wraps(run_backward)
    def paused(*args: Any, **kwargs: Any) -> Any:
        found = current()
        if not isinstance(found, kind):
            return run_backward(*args, **kwargs)
        mode: Any = found
        mode.__exit__(None, None, None)
        try:
            return run_backward(*args, **kwargs)
        finally:
            mode.__enter__()

    torch.autograd._engine_run_backward = paused  # type: ignore[attr-defined]


def see_operations(mode: TorchDispatchMode) -> None:
    """Enters a dispatch mode for a single call, without what PyTorch does for those that compiled code may meet."""
    _push_on_torch_dispatch_stack(mode)


def see_no_more_operations() -> None:
    """Leaves it."""
    _pop_torch_dispatch_stack(None)


def attention_backend(*args: Any, **kwargs: Any) -> int:
    """The backend that `scaled_dot_product_attention` takes for these arguments. Asking takes the host some 20 us."""
    return torch._fused_sdp_choice(*args, **kwargs)


def asks_for_function_modes(kind: type[torch.nn.Module]) -> bool:
    """Whether modules of a kind compute in another way where a function mode is active."""
    return issubclass(kind, _ASKING)


_ASKING = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)


def is_of_several(tensor: torch.Tensor) -> bool:
    """Whether what looks like one tensor stands for several, for which an operation is done at once."""
    kinds = torch._C._functorch
    return kinds.is_legacy_batchedtensor(tensor) or kinds.is_batchedtensor(tensor)


def stash_in_thread(name: str, given: object) -> None:
    """Keeps something for this thread, and for autograd's threads in what they run for it."""
    if _takes_without_counting():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(given))
    torch._C._stash_obj_in_tls(name, given)


@functools.cache
def _takes_without_counting() -> bool:
    """Whether PyTorch gives back a reference to what it keeps for a thread that it never took, as 2.11 does."""
    probe = object()
    count = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("torchstorm.probe", probe)
    takes = sys.getrefcount(probe) == count
    if takes:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return takes


def stashed_in_thread(name: str) -> Any:
    """What is kept so by that name; None for nothing."""
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else None


# ---------------------------------------------------------------------- checkpoints

Seen = Callable[[torch.Tensor, torch.Tensor], None]
_watchers: list[weakref.WeakMethod[Seen]] = []


def watch_checkpoints(seen: Seen) -> None:
    """From now on, a method is called for tensors that non-reentrant checkpoints save while they compute again.

    Other saved-tensor hooks do not see these. The method gets the tensor, and an alias of it that lives for as long as
    the checkpoint keeps it. Where PyTorch computes again in another way, nothing is seen.
    """
    _watchers[:] = [watcher for watcher in _watchers if watcher() is not None]
    _watchers.append(weakref.WeakMethod(seen))
    _hook_checkpoints()


@functools.cache
def _hook_checkpoints() -> None:
    hook: Any = getattr(torch.utils.checkpoint, "_recomputation_hook", None)
    if hook is None:
        return

    @functools.wraps(hook, updated=())
    def watched(*args: Any, **kwargs: Any) -> Any:
        hooks = hook(*args, **kwargs)
        pack = hooks.pack_hook

        def pack_watched(tensor: torch.Tensor) -> Any:
            alias = tensor.detach()
            for watcher in list(_watchers):
                method = watcher()
                if method is not None:
                    method(tensor, alias)
            return pack(alias)

        hooks.pack_hook = skip_dynamo(pack_watched)
        return hooks

    torch.utils.checkpoint._recomputation_hook = watched  # type: ignore[assignment, misc]
