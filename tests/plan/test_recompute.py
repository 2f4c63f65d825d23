"""What runs again, against a simulation that computes one value after the other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan import naive
from plan.traces import traces
from torchstorm.plan.forecast import Placement
from torchstorm.plan.recompute import Replayer, can_recompute, replays
from torchstorm.plan.trace import PACK, Moment, Op, SavedStorage, Trace, Value, make_parcels

MIB = 2**20


def at_random(trace: Trace, rng: random.Random, share: float) -> list[Placement]:
    """Some of what could be computed again."""
    able = can_recompute(trace)
    return [Placement(tier="recompute" if can and rng.random() < share else "keep") for can in able]


@pytest.mark.no_cover
@settings(max_examples=300, deadline=None)
@given(
    trace=traces(max_storages=16, with_ops=True),
    rng=st.randoms(use_true_random=False),
    share=st.sampled_from([0.3, 0.7, 1.0]),
)
def test_what_runs_again_is_what_the_naive_simulation_says(trace: Trace, rng: random.Random, share: float) -> None:
    replayer = Replayer(trace)
    for _ in range(4):  # the later ones meet what the first has left behind
        placements = at_random(trace, rng, share)
        recomputed = [number for number, place in enumerate(placements) if place.tier == "recompute"]
        remembered = replayer.play(recomputed)
        found = replays(trace, placements)
        try:
            expected = naive.computed_again(trace, placements)
        except naive.Impossible:
            assert found is None
            assert remembered is None
            continue
        for played in (found, remembered):
            assert played is not None
            assert list(played) == sorted(expected)
            for moment, replay in played.items():
                naively = expected[moment]
                assert replay.ops == naively.ops
                assert (set(replay.made), set(replay.sources)) == (naively.made, naively.sources)
                assert (len(replay.made), len(replay.sources)) == (len(naively.made), len(naively.sources))
                assert replay.transient_bytes == naively.transient_bytes
                recorded_s = len(naively.ops) * trace.host.record_s
                assert abs(replay.seconds - naively.seconds - recorded_s) < 1e-12


@settings(max_examples=100, deadline=None)
@given(trace=traces(with_ops=True))
@pytest.mark.no_cover
def test_a_parcel_can_be_computed_again_where_the_naive_simulation_computes_it(trace: Trace) -> None:
    for number, can in enumerate(can_recompute(trace)):
        placements = [Placement(tier="recompute" if other == number else "keep") for other in range(len(trace.parcels))]
        try:
            naive.computed_again(trace, placements)
        except naive.Impossible:
            assert not can
        else:
            assert can


@pytest.mark.parametrize("op_of_input", [-1, 0])
def test_what_a_later_step_needs_must_be_computable_from_what_is_still_held(op_of_input: int) -> None:
    """A step without a backward: nothing is needed in it, and all is held when it is over."""
    made_by_nothing = Op(name="make", compute_s=1e-3, scratch_bytes=0, inputs=(), outputs=(0,))
    product = Op(name="product", compute_s=1e-3, scratch_bytes=0, inputs=(0,), outputs=(1,))
    ops = (made_by_nothing, product) if op_of_input == 0 else (product,)
    storage = SavedStorage(nbytes=MIB, made=1, owned=1, needed=2, freed=2, parcel=0, block="", value=1)
    trace = Trace(
        device="cpu",
        moments=tuple(
            Moment(kind=kind, storage=number, nbytes=MIB, compute_s=1e-3, other_bytes=0, still_bytes=0)
            for kind, number in (("enter", -1), (PACK, 0))
        ),
        storages=(storage,),
        parcels=make_parcels((storage,), [MIB]),
        base_bytes=0,
        staging_bytes=0,
        ops=ops,
        values=(Value(nbytes=MIB, op=op_of_input, storage=-1), Value(nbytes=MIB, op=len(ops) - 1, storage=0)),
    )
    assert can_recompute(trace) == [op_of_input == 0]
    assert (replays(trace, [Placement(tier="recompute")]) is None) == (op_of_input < 0)


def test_pointwise_operations_one_behind_another_take_as_long_as_what_one_kernel_reads_and_writes() -> None:
    product = Op(name="aten.mm.default", compute_s=10e-3, scratch_bytes=0, inputs=(), outputs=(0,))
    steps = [
        Op(name="aten.mul.Tensor", compute_s=1e-3, scratch_bytes=0, inputs=(0,), outputs=(1,), number=1),
        Op(name="torch.to", compute_s=3e-3, scratch_bytes=0, inputs=(1,), outputs=(2,), number=2),
        Op(name="aten.add.Tensor", compute_s=4e-3, scratch_bytes=0, inputs=(2, 1), outputs=(3,), number=3),
    ]
    sizes = [MIB, MIB, 2 * MIB, MIB]
    storage = SavedStorage(nbytes=MIB, made=1, owned=2, needed=4, freed=5, parcel=0, block="", value=3)
    kept = SavedStorage(nbytes=MIB, made=0, owned=1, needed=5, freed=6, parcel=1, block="", value=0)
    storages = (storage, kept)
    trace = Trace(
        device="cuda",
        moments=tuple(
            Moment(kind="enter", storage=-1, nbytes=0, compute_s=0.0, other_bytes=0, still_bytes=0) for _ in range(6)
        ),
        storages=storages,
        parcels=make_parcels(storages, [MIB, MIB]),
        base_bytes=0,
        staging_bytes=0,
        ops=(product, *steps),
        values=tuple(Value(nbytes=size, op=at, storage=[1, -1, -1, 0][at]) for at, size in enumerate(sizes)),
    )
    alone = Replayer(trace).alone(0)
    together = Replayer(replace(trace, host=replace(trace.host, fuses=True))).alone(0)
    assert alone is not None
    assert together is not None
    assert (alone.ops, together.ops) == ([1, 2, 3], [1, 2, 3])
    assert alone.compute_s == pytest.approx(8e-3)
    # Read and written one by one: 1 + 1, 1 + 2, 3 + 1 MiB; in one kernel: 1 + 1.
    assert together.compute_s == pytest.approx(8e-3 * 2 / 9)
    assert together.transient_bytes == alone.transient_bytes
