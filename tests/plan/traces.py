"""Traces that a step could have left behind: random ones, hand-made ones and large regular ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from torchstorm.plan.machine import Machine
from torchstorm.plan.trace import (
    ENTER,
    PACK,
    UNPACK,
    HostCost,
    Moment,
    Op,
    Parcel,
    SavedStorage,
    Trace,
    Value,
    make_parcels,
)

NOT_OWNED = 1 << 30  # what the recorder writes for inputs on CUDA


def random_trace(
    rng: random.Random, device: str, *, max_storages: int = 10, padding: bool = True, with_ops: bool = False
) -> Trace:
    """One or two forward and backward passes, with everything that a recorder may meet.

    Small storages share parcels, as the Session packs them: an unpack or a full buffer closes one. With `padding`
    their sizes are no multiples of the alignment within a parcel. With `with_ops` most of what was saved can be
    computed again, from what was saved and what was not.
    """
    events = _events(rng, max_storages)
    num_moments = len(events)
    made: list[int] = []
    needed: dict[int, int] = {}
    last: dict[int, int] = {}
    for moment, (kind, number) in enumerate(events):
        if number < 0:
            continue
        if number == len(made):
            made.append(moment)
        if kind == UNPACK:
            needed.setdefault(number, moment)
        last[number] = moment
    parcel_bytes: list[int] = []
    storages: list[SavedStorage] = []
    slab = slab_moment = -1
    for number, moment in enumerate(made):
        nbytes = rng.choice((4096, 8192, 20_480, 65_536)) + (rng.choice((0, 4, 100)) if padding else 0)
        kind = rng.choice(("large", "large", "small", "small", "fixed"))
        closed = slab >= 0 and any(kind == UNPACK for kind, _ in events[slab_moment:moment])
        parcel = -1
        if kind == "large":
            parcel = len(parcel_bytes)
            parcel_bytes.append(nbytes)
        elif kind == "small":
            if slab < 0 or closed or rng.random() < 0.3:
                slab = len(parcel_bytes)
                parcel_bytes.append(0)
            parcel, slab_moment = slab, moment
            parcel_bytes[slab] += -(-nbytes // 512) * 512
        freed = _freed(rng, last[number] + 1, num_moments)
        storages.append(
            SavedStorage(
                nbytes=nbytes,
                made=moment,
                owned=moment if device == "cpu" else _owned(rng, moment, freed, parcel),
                needed=needed.get(number, num_moments),
                freed=freed,
                parcel=parcel,
                block=rng.choice(("", "h.0.mlp", "h.1.mlp", "head")),
            )
        )
    moments = tuple(
        Moment(
            kind=kind,
            storage=number,
            nbytes=storages[number].nbytes if number >= 0 else 0,
            compute_s=rng.choice((0.0, 1e-4, 1e-3, 7e-3)),
            other_bytes=rng.choice((0, 5000, 40_000)) if device == "cuda" else 0,
        )
        for kind, number in events
    )
    trace = Trace(
        device=device,
        moments=moments,
        storages=tuple(storages),
        parcels=make_parcels(storages, parcel_bytes),
        base_bytes=rng.choice((0, 1000)) if device == "cuda" else 0,
        staging_bytes=rng.choice((0, 8192)),
        host=random_host(rng) if device == "cuda" else HostCost(),
        blocks_s=tuple((f"h.{number}", rng.random()) for number in range(rng.randrange(3))),
    )
    return _with_ops(rng, trace) if with_ops else trace


def _with_ops(rng: random.Random, trace: Trace) -> Trace:
    ops: list[Op] = []
    values: list[Value] = []
    storages = list(trace.storages)

    def add_op(num_outputs: int) -> tuple[int, ...]:
        """An operation on what there is, and values for what it makes."""
        inputs = tuple(rng.sample(range(len(values)), min(len(values), rng.randint(0, 2))))
        outputs = tuple(range(len(values), len(values) + num_outputs))
        for _ in outputs:
            values.append(Value(nbytes=rng.choice((100, 4096, 30_000)), op=len(ops), storage=-1))
        ops.append(
            Op(
                name=rng.choice(("norm", "matmul")),
                compute_s=rng.choice((0.0, 1e-5, 1e-4, 1e-3)),
                scratch_bytes=rng.choice((0, 3000)) if trace.device == "cuda" else 0,
                inputs=inputs,
                outputs=outputs,
                number=len(ops),
            )
        )
        return outputs

    for number, storage in enumerate(storages):
        how = rng.random()
        if how < 0.15:
            continue  # nobody knows where it came from
        if how < 0.25:
            value = len(values)  # its bytes are known, not what made them
            values.append(Value(nbytes=storage.nbytes, op=-1, storage=number))
        else:
            if rng.random() < 0.3:
                add_op(1)  # what nobody saved
            unsaved = [index for index, value in enumerate(values) if value.storage < 0]
            value = rng.choice(unsaved) if unsaved and rng.random() < 0.3 else add_op(rng.choice((1, 1, 2)))[0]
            values[value] = replace(values[value], nbytes=storage.nbytes, storage=number)
        storages[number] = replace(storage, value=value)
    moments = [
        replace(moment, still_bytes=min(moment.other_bytes, rng.choice((0, 5000, 40_000)))) for moment in trace.moments
    ]
    return replace(trace, moments=tuple(moments), storages=tuple(storages), ops=tuple(ops), values=tuple(values))


def _events(rng: random.Random, max_storages: int) -> list[tuple[str, int]]:
    events = [(ENTER, -1)]
    num_storages = 0
    for _ in range(rng.choice((1, 1, 2))):
        first = num_storages
        for _ in range(rng.randint(0, max_storages // 2)):
            events.append((PACK, num_storages))
            num_storages += 1
            if rng.random() < 0.2:  # another view of a storage that is saved already, or a weight
                events.append((PACK, rng.randint(first, num_storages - 1) if rng.random() < 0.5 else -1))
        backward = list(range(num_storages - 1, first - 1, -1))
        order = rng.choice(("lifo", "nearly", "any", "part"))
        if order == "nearly" and len(backward) > 2:
            at = rng.randint(0, len(backward) - 2)
            backward[at], backward[at + 1] = backward[at + 1], backward[at]
        elif order == "any":
            rng.shuffle(backward)
        elif order == "part":
            backward = [number for number in backward if rng.random() < 0.7]
        for number in backward:
            events.append((UNPACK, number))
            if rng.random() < 0.2:
                events.append((UNPACK, number if rng.random() < 0.5 else -1))
    return events


def _freed(rng: random.Random, earliest: int, num_moments: int) -> int:
    how = rng.choice(("at once", "at once", "later", "never"))
    return {"at once": earliest, "later": rng.randint(earliest, num_moments), "never": num_moments}[how]


def _owned(rng: random.Random, made: int, freed: int, parcel: int) -> int:
    if parcel < 0:
        return rng.choice((made, NOT_OWNED))
    return rng.choice((made, made, min(made + 1, freed), rng.randint(made, freed)))


def random_host(rng: random.Random) -> HostCost:
    """Mostly none, and some that a step does not notice."""
    if rng.random() < 0.6:
        return HostCost()
    return HostCost(
        record_s=rng.choice((0.0, 1e-4, 1e-3)),
        move_s=rng.choice((0.0, 1e-4, 1e-3)),
        idle_s=rng.choice((0.0, 5e-4, 1.0)),
    )


def random_machine(rng: random.Random) -> Machine:
    """From a link that stops everything to one that nobody notices."""
    speeds = (1e6, 1e7, 1e8, 1e9, 1e12)
    return Machine(
        name="random",
        d2h_bytes_per_s=rng.choice(speeds),
        h2d_bytes_per_s=rng.choice(speeds),
        disk_write_bytes_per_s=rng.choice(speeds),
        disk_read_bytes_per_s=rng.choice(speeds),
        disk_delay_s_per_byte=rng.choice((0.0, 0.0, 1e-9, 1e-7)),
    )


@st.composite
def traces(
    draw: st.DrawFn,
    *,
    device: str | None = None,
    max_storages: int = 10,
    padding: bool = True,
    with_ops: bool | None = None,
) -> Trace:
    """`random_trace`, in a form that Hypothesis can shrink; with and without operations where nothing is said."""
    rng = draw(st.randoms(use_true_random=False))
    return random_trace(
        rng,
        device or draw(st.sampled_from(["cpu", "cuda"])),
        max_storages=max_storages,
        padding=padding,
        with_ops=draw(st.booleans()) if with_ops is None else with_ops,
    )


def machines() -> st.SearchStrategy[Machine]:
    return st.builds(random_machine, st.randoms(use_true_random=False))


def trace_of(
    kinds: str,
    storages: Sequence[SavedStorage],
    *,
    seconds: Sequence[float],
    device: str = "cpu",
    other_bytes: int = 0,
    staging_bytes: int = 0,
    parcel_bytes: Sequence[int] | None = None,
) -> Trace:
    """A hand-made trace. `kinds` names the moments after the entry: "p0" packs storage 0, "u0" unpacks it."""
    events = [(ENTER, -1), *((PACK if text[0] == "p" else UNPACK, int(text[1:])) for text in kinds.split())]
    if parcel_bytes is None:
        parcel_bytes = [storage.nbytes for storage in storages if storage.parcel >= 0]
    return Trace(
        device=device,
        moments=tuple(
            Moment(
                kind=kind,
                storage=number,
                nbytes=storages[number].nbytes if number >= 0 else 0,
                compute_s=compute_s,
                other_bytes=other_bytes,
            )
            for (kind, number), compute_s in zip(events, seconds, strict=True)
        ),
        storages=tuple(storages),
        parcels=make_parcels(storages, parcel_bytes),
        base_bytes=0,
        staging_bytes=staging_bytes,
    )


def blocks_trace(
    num_blocks: int, per_block: int, *, device: str = "cuda", nbytes: int = 2**20, compute_s: float = 1e-4
) -> Trace:
    """Regular blocks, each storage in a parcel of its own, needed last in first out."""
    number = num_blocks * per_block
    num_moments = 1 + 2 * number
    storages = tuple(
        SavedStorage(
            nbytes=nbytes * (1 + index % per_block % 4),
            made=1 + index,
            owned=1 + index,
            needed=num_moments - 1 - index,
            freed=num_moments - index,
            parcel=index,
            block=f"h.{index // per_block}.mlp",
        )
        for index in range(number)
    )
    kinds = [(ENTER, -1), *((PACK, i) for i in range(number)), *((UNPACK, i) for i in reversed(range(number)))]
    return Trace(
        device=device,
        moments=tuple(
            Moment(
                kind=kind,
                storage=i,
                nbytes=storages[i].nbytes if i >= 0 else 0,
                compute_s=compute_s * (1 if kind == PACK else 2),
                other_bytes=num_blocks * nbytes if device == "cuda" else 0,
            )
            for kind, i in kinds
        ),
        storages=storages,
        parcels=make_parcels(storages, [storage.nbytes for storage in storages]),
        base_bytes=0,
        staging_bytes=0,
    )


def is_parcel_valid(parcel: Parcel) -> bool:
    """What the recorder promises of a parcel, so that a test's own traces keep to it too."""
    return (
        parcel.made <= parcel.sealed < min(parcel.needed, parcel.freed) and parcel.made <= parcel.owned <= parcel.freed
    )


def gpt_trace(num_blocks: int = 10, *, tokens: int = 32_768, sequences: int = 1) -> Trace:
    """A GPT of width 4096 in bfloat16 on an H200, block by block as it was measured there.

    Args:
        num_blocks: how many.
        tokens: in a sequence.
        sequences: in a batch.
    """
    mib = 2**20
    scale = tokens * sequences / 32_768
    unit = int(256 * mib * scale)
    attend_s = 15e-3 * scale * tokens / 32_768
    weights, gradient = 3840 * mib, 384 * mib
    # Name, bytes, seconds and inputs of what makes it, whether autograd saves it, and until what is made the model's
    # own code still holds it. In the order of forward.
    block = (
        ("x", unit, 0.19e-3, ("x2", "mlp"), True, "x2"),
        ("stats", mib // 4, 0.0, (), True, "stats"),
        ("ln1", unit, 0.13e-3, ("x",), True, "qkv"),
        ("qkv", 3 * unit, 5.1e-3, ("ln1",), True, "attn"),
        ("lse", unit // 64, attend_s / scale, ("qkv",), True, "attn"),
        ("attn", unit, 0.0, ("qkv",), True, "proj"),
        ("proj", unit, 1.7e-3, ("attn",), False, ""),
        ("x2", unit, 0.19e-3, ("x", "proj"), True, "x"),
        ("stats", mib // 4, 0.0, (), True, "stats"),
        ("ln2", unit, 0.13e-3, ("x2",), True, "h"),
        ("h", 4 * unit, 6.8e-3, ("ln2",), True, "gelu"),
        ("gelu", 4 * unit, 0.5e-3, ("h",), True, "mlp"),
        ("mlp", unit, 6.8e-3, ("gelu",), False, ""),
    )
    back = {
        "gelu": 13.6e-3,
        "h": 0.75e-3,
        "ln2": 13.8e-3,
        "x2": 0.38e-3,
        "attn": 3.4e-3,
        "lse": 2.86 * attend_s / scale,
    }
    back |= {"qkv": 0.0, "ln1": 10.3e-3, "x": 0.38e-3, "stats": 0.0}
    on_top = {"gelu": 6, "h": 8, "ln2": 6, "x2": 2, "attn": 3, "lse": 5, "qkv": 5, "ln1": 5, "x": 2, "stats": 2}
    ops: list[Op] = []
    values: list[Value] = []
    saved: list[dict[str, Any]] = []
    latest: dict[str, int] = {}
    events: list[tuple[str, int, float, int, int]] = [(ENTER, -1, 0.0, weights, weights)]
    for index in range(num_blocks):
        for name, nbytes, seconds, inputs, is_saved, held_until in block:
            for one in saved:
                if one["held_until"] == name and one["owned"] < 0:
                    one["owned"] = len(events)
            known = tuple(latest[value] for value in inputs if value in latest)
            if name == "attn":  # the operation that made lse made it, too
                ops[-1] = replace(ops[-1], outputs=(*ops[-1].outputs, len(values)))
            elif name != "stats":
                ops.append(
                    Op(name=name, compute_s=seconds * scale, scratch_bytes=0, inputs=known, outputs=(len(values),))
                )
            busy = weights + sum(one["nbytes"] for one in saved if one["owned"] < 0) + nbytes
            kind, number, before_s, other, still = events[-1]
            events[-1] = (kind, number, before_s + seconds * scale, max(other, busy), still)
            value = -1
            if name != "stats":
                value = latest[name] = len(values)
                values.append(Value(nbytes=nbytes, op=len(ops) - 1, storage=len(saved) if is_saved else -1))
            if is_saved:
                saved.append(
                    {
                        "name": name,
                        "nbytes": nbytes,
                        "made": len(events),
                        "owned": -1,
                        "held_until": held_until,
                        "value": value,
                        "block": f"h.{index}",
                    }
                )
                events.append((PACK, len(saved) - 1, 0.0, busy, busy))
    num_packs = len(events)
    order = sorted(range(len(saved)), key=lambda n: (-saved[n]["made"] - 1.5 * (saved[n]["name"] == "lse"), n))
    gradients = weights
    for number in order:
        one = saved[number]
        one["needed"] = len(events)
        # What attention made is there until its backward has run.
        one["freed"] = len(events) + (2 if one["name"] == "attn" else 1)
        gradients += gradient // 11  # a block has eleven
        other = gradients + on_top[one["name"]] * unit
        events.append((UNPACK, number, back[one["name"]] * scale, other, gradients + 2 * unit))
    storages: list[SavedStorage] = []
    parcel_bytes: list[int] = [0]
    for one in saved:
        is_small = one["name"] == "stats"
        if is_small:
            parcel_bytes[0] += one["nbytes"]
        else:
            parcel_bytes.append(one["nbytes"])
        owned = one["owned"] if one["owned"] >= 0 else num_packs
        storages.append(
            SavedStorage(
                nbytes=one["nbytes"],
                made=one["made"],
                owned=max(one["made"], owned),
                needed=one["needed"],
                freed=min(one["freed"], len(events)),
                parcel=0 if is_small else len(parcel_bytes) - 1,
                block=one["block"],
                value=one["value"],
            )
        )
    return Trace(
        device="cuda",
        moments=tuple(
            Moment(
                kind=kind,
                storage=number,
                nbytes=storages[number].nbytes if number >= 0 else 0,
                compute_s=seconds,
                other_bytes=other,
                still_bytes=min(still, other),
            )
            for kind, number, seconds, other, still in events
        ),
        storages=tuple(storages),
        parcels=make_parcels(storages, parcel_bytes),
        base_bytes=weights,
        staging_bytes=0,
        ops=tuple(ops),
        values=tuple(values),
    )
