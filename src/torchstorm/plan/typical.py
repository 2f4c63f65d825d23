"""Times of one step without what happened to disturb it: a kernel that was loaded, a host that came too late.

A model repeats its blocks, so most operations and intervals have many of their kind. What takes far longer than its
kind usually does takes as long as its kind.

Where a GPU waits for the host, every operation of a kind is timed with the host's work for it, and light ones take
several times as long as they do on the GPU alone. What they take there is known: they read and write memory, and do
little else. So one takes no longer than its bytes need at the speed of the fastest ones of the same step.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

from torchstorm.plan.trace import PACK, Op, Trace, taking

_FAR = 2.0  # times as long as usual
_FEW = 4  # of a kind, of which nobody knows what is usual
_AROUND = 3  # moments on each side that tell an interval's kind
_LIGHT = frozenset(
    {"_fused_rms_norm", "_log_softmax", "_softmax", "_to_copy", "abs", "add", "addcmul", "cat", "clamp", "clone", "cos"}
    | {"div", "elu", "exp", "gelu", "hardtanh", "leaky_relu", "masked_fill", "mean", "mish", "mul", "native_dropout"}
    | {"native_layer_norm", "neg", "pow", "relu", "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "sub", "tanh"}
    | {"where"}
)
"""Operations of PyTorch's that a GPU's memory keeps busy, by their names without "aten." and what overload they are."""
_LARGE_BYTES = 2**25  # of an operation that tells the memory's speed
_FASTEST = 50  # the fastest 1/50 of these tells it
_SLOWER = 1.5  # than that speed, most are
_BEGIN_S = 5e-6
_BETWEEN_SAVES_S = 1e-5  # more than two marks with nothing between them
LATE = 1.25  # times what its work takes: of a part of a step in which the device has waited for the host
_BACKWARD = 2  # times what a forward takes
_MOST_OF_BLOCKS = 0.25
MOST_OF_FORWARD = 0.9  # after that, the last operations are often long, and the device comes late for them alone


def typical(trace: Trace) -> Trace:
    """The trace with usual times in place of far longer ones.

    Args:
        trace: of one step, with times as they were measured.
    """
    edge = [("", 0)] * _AROUND
    looks = [*edge, *((moment.kind, moment.nbytes) for moment in trace.moments), *edge]
    of_moments = _usual(
        [tuple(looks[at : at + 2 * _AROUND + 1]) for at in range(trace.num_moments)],
        [moment.compute_s for moment in trace.moments],
        part=2,
    )
    return replace(trace, ops=typical_ops(trace), moments=taking(trace.moments, of_moments))


def typical_ops(trace: Trace) -> tuple[Op, ...]:
    """The same of its operations alone."""
    sizes = [value.nbytes for value in trace.values]
    found = _usual(
        [(op.name, *(sizes[one] for one in op.inputs), -1, *(sizes[one] for one in op.outputs)) for op in trace.ops],
        [op.compute_s for op in trace.ops],
        part=4,  # whatever disturbs an operation makes it longer
    )
    return taking(trace.ops, _at_the_memory_s_speed(trace, found) if trace.device == "cuda" else found)


def forward_of_operations(trace: Trace, measured: Sequence[float] | None = None) -> list[float] | None:
    """Seconds that the operations in every interval before backward take a GPU, however late the host may come.

    An operation ran before what it made, or what later ones made, was saved first; and a compiled block before what it
    saved. What is not known to have made a saved storage, as a compiled loss, takes what was measured before it saved
    anything; by as much less as was measured beside the operations that are known.

    Args:
        trace: of the step.
        measured: seconds of its intervals; None for those of the trace.

    Returns:
        None on a CPU, and where nothing is known to have made what is saved.
    """
    if trace.device != "cuda" or not trace.ops:
        return None
    measured = [one.compute_s for one in trace.moments[: trace.turn]] if measured is None else measured
    seconds, unknown, knows_any = [0.0] * trace.turn, set[int](), False
    for one in trace.storages:
        if one.parcel < 0:
            continue
        if (one.value >= 0 and trace.values[one.value].op >= 0) or any(one.is_of(name) for name, _ in trace.blocks_s):
            knows_any = True
        elif one.made <= len(seconds):
            unknown.add(_begin_of(trace, one.made - 1, measured))
    if not knows_any:
        return None
    for name, took_s in trace.blocks_s:
        at = trace.first_save(name) - 1
        if at < len(seconds) and at not in unknown:
            seconds[at] += took_s
    at = trace.num_moments - 1
    for op in reversed(trace.ops):
        saved = [trace.values[value].storage for value in op.outputs]
        at = max(0, min([at, *(trace.storages[one].made - 1 for one in saved if one >= 0)]))
        if at < len(seconds) and at not in unknown:  # backward saves, too, where checkpointing runs blocks again in it
            seconds[at] += op.compute_s
    beside_s = sum(took_s for at, took_s in enumerate(measured) if at not in unknown)
    share = min(1.0, sum(seconds) / beside_s) if beside_s else 1.0
    for at in unknown:
        seconds[at] = measured[at] * share
    return seconds if any(seconds) else None


def _begin_of(trace: Trace, at: int, measured: Sequence[float]) -> int:
    """The interval in which a function ran that had saved something at its end. It saves all at once, whoever has made
    it, and a device has nothing to do in between."""
    while at and measured[at] < _BETWEEN_SAVES_S and trace.moments[at].kind == PACK:
        at -= 1
    return at


def beside_the_host(operations: list[float], base_s: float) -> tuple[list[float], float]:
    """Seconds of the forward's intervals, and how many the host has to spare in it.

    Args:
        operations: what their operations take the device.
        base_s: what the forward takes the host, but for what plans differ in.
    """
    device_s = sum(operations)
    if base_s <= device_s:
        return operations, spare_s(operations, base_s)
    return [one * base_s / device_s for one in operations], 0.0


def with_forward(trace: Trace, operations: list[float], base_s: float) -> Trace:
    """The trace with a forward that takes the device and the host so long; see `beside_the_host`."""
    seconds, idle_s = beside_the_host(operations, base_s)
    moments = (*taking(trace.moments[: trace.turn], seconds), *trace.moments[trace.turn :])
    return replace(trace, moments=moments, host=replace(trace.host, idle_s=idle_s))


def spare_s(seconds: Sequence[float], base_s: float) -> float:
    """How many seconds the host has to spare in a forward, if it takes as long for each of its intervals.

    A model's last operations, as those of a large vocabulary, may take the device long. They do not make up for a host
    that came late before them.

    Args:
        seconds: of the device, per interval of the forward.
        base_s: what all of it takes the host, but for what plans differ in.
    """
    num_most = math.ceil(MOST_OF_FORWARD * len(seconds))
    as_most_s = sum(seconds[:num_most]) * len(seconds) / num_most if num_most else 0.0
    return max(0.0, min(sum(seconds), as_most_s) - base_s)


def without_waiting(trace: Trace) -> Trace:
    """The trace of a step whose every moment was marked, with a forward that takes what its operations do where the GPU
    has waited for the host in it: that was not the model's work, but the marking's."""
    found = forward_of_operations(trace)
    if found is None or trace.forward_s <= LATE * sum(found):
        return trace
    return replace(trace, moments=(*taking(trace.moments[: trace.turn], found), *trace.moments[trace.turn :]))


def _at_the_memory_s_speed(trace: Trace, seconds: list[float]) -> list[float]:
    """The times, those of light operations no longer than their bytes need."""
    sizes = [value.nbytes for value in trace.values]
    light = {
        at: sum(sizes[one] for one in (*op.inputs, *op.outputs))
        for at, op in enumerate(trace.ops)
        if op.name.startswith("aten.") and op.name.split(".")[1] in _LIGHT
    }
    speeds = sorted(
        nbytes / seconds[at] for at, nbytes in light.items() if nbytes >= _LARGE_BYTES and seconds[at] > 0.0
    )
    if len(speeds) < _FEW:
        return seconds
    bytes_per_s = speeds[-1 - len(speeds) // _FASTEST]
    found = list(seconds)
    for at, nbytes in light.items():
        found[at] = min(seconds[at], _SLOWER * nbytes / bytes_per_s + _BEGIN_S)
    return found


def _usual(kinds: Sequence[Hashable], seconds: Sequence[float], *, part: int) -> list[float]:
    """The times, far too long ones of a kind replaced by what the fastest 1/`part` of that kind stay within."""
    by_kind: dict[Hashable, list[float]] = {}
    for kind, took in zip(kinds, seconds, strict=True):
        by_kind.setdefault(kind, []).append(took)
    usual = {kind: sorted(times)[len(times) // part] for kind, times in by_kind.items() if len(times) >= _FEW}
    return [
        usual[kind] if kind in usual and took > _FAR * usual[kind] else took
        for kind, took in zip(kinds, seconds, strict=True)
    ]


def without_compilation(trace: Trace) -> Trace:
    """The trace of a step that has compiled something, and in which what every compiled block takes by itself is known.
    In the forward blocks take that; and no other moment takes longer than a part of all of them that is long for a head
    and its loss."""
    longest_s = _MOST_OF_BLOCKS * (1 + _BACKWARD) * sum(took_s for _, took_s in trace.blocks_s)
    if not longest_s:
        return trace
    seconds = [min(one.compute_s, longest_s) for one in trace.moments]
    for name, took_s in trace.blocks_s:
        at = trace.first_save(name) - 1
        if at < trace.turn and trace.moments[at].compute_s > LATE * took_s:
            seconds[at] = took_s
    return replace(trace, moments=taking(trace.moments, seconds))
