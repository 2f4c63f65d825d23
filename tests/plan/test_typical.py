"""Usual times in place of those that something disturbed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchstorm.plan.trace import ENTER, PACK, UNPACK, Moment, Op, SavedStorage, Trace, Value, make_parcels
from torchstorm.plan.typical import (
    beside_the_host,
    forward_of_operations,
    spare_s,
    typical,
    with_forward,
    without_compilation,
    without_waiting,
)


def moment(seconds: float, *, kind: str = PACK, nbytes: int = 8) -> Moment:
    return Moment(kind=kind, storage=0, nbytes=nbytes, compute_s=seconds, other_bytes=0)


def trace_of(moments: list[Moment], ops: list[tuple[str, int, float]] | None = None) -> Trace:
    values = tuple(Value(nbytes=nbytes, op=at, storage=-1) for at, (_, nbytes, _) in enumerate(ops or ()))
    found = tuple(
        Op(name=name, compute_s=seconds, scratch_bytes=0, inputs=(), outputs=(at,))
        for at, (name, _, seconds) in enumerate(ops or ())
    )
    return Trace(
        device="cuda",
        moments=tuple(moments),
        storages=(),
        parcels=(),
        base_bytes=0,
        staging_bytes=0,
        ops=found,
        values=values,
    )


def op_times(*ops: tuple[str, int, float]) -> list[float]:
    return [op.compute_s for op in typical(trace_of([], list(ops))).ops]


def test_an_operation_that_took_far_longer_than_its_kind_takes_as_long_as_that() -> None:
    times = op_times(("silu", 8, 0.7), ("silu", 8, 1.0), ("silu", 8, 9.0), ("silu", 8, 1.1), ("silu", 8, 1.9))
    assert times == pytest.approx([0.7, 1.0, 1.0, 1.1, 1.9])


def test_operations_of_other_sizes_and_names_are_another_kind() -> None:
    slow = ("silu", 800, 9.0)
    assert op_times(*[("silu", 8, 1.0)] * 5, slow, ("gelu", 8, 9.0))[-2:] == [9.0, 9.0]


def test_three_of_a_kind_do_not_tell_what_is_usual() -> None:
    assert op_times(("silu", 8, 1.0), ("silu", 8, 1.0), ("silu", 8, 9.0)) == [1.0, 1.0, 9.0]


def test_an_interval_is_known_by_the_moments_around_it() -> None:
    block = [moment(1.0, nbytes=8), moment(2.0, nbytes=16), moment(3.0, nbytes=32), moment(1.0, kind=UNPACK)]
    moments = block * 8
    moments[13] = moment(50.0, nbytes=16)  # of the fourth block
    moments[0] = moment(40.0)  # nothing like it: the step begins
    times = [one.compute_s for one in typical(trace_of(moments)).moments]
    assert times == [40.0, *[one.compute_s for one in block * 8][1:]]


def test_what_is_long_in_every_block_stays_long() -> None:
    moments = [moment(1.0, nbytes=8), moment(30.0, nbytes=16)] * 9
    assert typical(trace_of(moments)).moments == tuple(moments)


MIB = 2**20
FAST = [("aten.mul.Tensor", 64 * MIB, 16e-6)] * 8  # 4 TiB/s


def test_a_light_operation_takes_no_longer_than_its_bytes_need_at_the_speed_of_the_fastest() -> None:
    late = [("aten.native_layer_norm.default", 16 * MIB, 70e-6)] * 8
    times = op_times(*FAST, *late)
    assert times[:8] == [16e-6] * 8
    assert times[8:] == pytest.approx([1.5 * 4e-6 + 5e-6] * 8)


def test_one_that_is_faster_and_one_that_computes_keep_their_times() -> None:
    quick, product = [("aten.silu.default", 16 * MIB, 6e-6)] * 4, [("aten.addmm.default", 16 * MIB, 300e-6)] * 4
    assert op_times(*FAST, *quick, *product)[8:] == [6e-6] * 4 + [300e-6] * 4


def test_what_a_light_operation_reads_counts_as_well() -> None:
    ops = [*FAST, ("aten.relu.default", 64 * MIB, 1.0), ("aten.add.Tensor", 64 * MIB, 1.0)]
    trace = trace_of([], ops)
    last = replace(trace.ops[-1], inputs=(8,))
    found = typical(replace(trace, ops=(*trace.ops[:-1], last)))
    assert [op.compute_s for op in found.ops[-2:]] == pytest.approx([1.5 * 16e-6 + 5e-6, 1.5 * 32e-6 + 5e-6])


def test_small_operations_and_few_do_not_tell_the_memory_s_speed() -> None:
    small = [("aten.mul.Tensor", 2 * MIB, 1e-6)] * 40
    late = ("aten.tanh.default", 16 * MIB, 70e-6)
    assert op_times(*small, late)[-1] == 70e-6
    assert op_times(*FAST[:3], late)[-1] == 70e-6


def test_on_a_cpu_light_operations_keep_their_times() -> None:
    trace = replace(trace_of([], [*FAST, ("aten.tanh.default", 16 * MIB, 70e-6)]), device="cpu")
    assert typical(trace).ops[-1].compute_s == 70e-6


def saving_step(forward_s: float, *op_times: float, is_known: bool = True, device: str = "cuda") -> Trace:
    """Every operation's output is saved once, and the first one's twice; all intervals of the forward are as long."""
    num = len(op_times)
    saved = [(PACK, at) for at in range(num)]
    signatures = [(ENTER, -1), saved[0], *saved, *((UNPACK, at) for at in reversed(range(num)))]
    moments = tuple(
        Moment(kind=kind, storage=storage, nbytes=8, other_bytes=0, compute_s=0.5 if kind == UNPACK else forward_s)
        for kind, storage in signatures
    )
    storages = tuple(
        SavedStorage(
            nbytes=8,
            made=1 + at + (at > 0),
            owned=2 + at,
            needed=num + 2 + num - at,
            freed=num + 3 + num - at,
            parcel=at,
            block="",
            value=at if is_known else -1,
        )
        for at in range(num)
    )
    return Trace(
        device=device,
        moments=moments,
        storages=storages,
        parcels=make_parcels(storages, [8] * num),
        base_bytes=0,
        staging_bytes=0,
        ops=tuple(
            Op(name="mm", compute_s=took, scratch_bytes=0, inputs=(), outputs=(at,)) for at, took in enumerate(op_times)
        ),
        values=tuple(Value(nbytes=8, op=at, storage=at) for at in range(num)),
    )


def test_an_operation_ran_in_the_interval_before_its_result_was_first_saved() -> None:
    assert forward_of_operations(saving_step(1.0, 0.1, 0.2, 0.4)) == [0.1, 0.0, 0.2, 0.4, 0.0]


def test_one_whose_result_is_not_saved_ran_before_what_was_saved_next() -> None:
    trace = saving_step(1.0, 0.1, 0.2, 0.4)
    (first, second, third), values = trace.ops, trace.values
    unsaved = replace(trace, ops=(first, second, replace(second, outputs=(3,)), third), values=(*values, values[1]))
    unsaved = replace(unsaved, values=(*values, Value(nbytes=8, op=2, storage=-1)))
    assert forward_of_operations(unsaved) == pytest.approx([0.1, 0.0, 0.2, 0.6, 0.0])


def test_one_whose_result_backward_saves_is_no_part_of_the_forward() -> None:
    trace = saving_step(1.0, 0.1, 0.2, 0.4)
    storages = (*trace.storages[:2], replace(trace.storages[2], made=7, owned=7, needed=8, freed=9))
    moments = (*trace.moments[:4], *trace.moments[5:], replace(trace.moments[4]), trace.moments[5])
    assert forward_of_operations(replace(trace, storages=storages, moments=moments)) == [0.1, 0.0, 0.2, 0.0]


def test_what_saved_a_storage_and_is_not_known_takes_what_was_measured() -> None:
    trace = saving_step(1.0, 0.1, 0.2, 0.4)
    storages = (*trace.storages[:2], replace(trace.storages[2], value=-1))
    unknown = replace(trace, storages=storages, ops=trace.ops[:2], values=trace.values[:2])
    assert forward_of_operations(unknown, [0.1, 0.0, 0.2, 2.0, 0.0]) == [0.1, 0.0, 0.2, 2.0, 0.0]
    late = without_waiting(unknown)  # all take 1.0, and of the 4.0 beside it operations take 0.3
    assert [one.compute_s for one in late.moments] == pytest.approx([0.1, 0.0, 0.2, 0.075, 0.0, 0.5, 0.5, 0.5])


def test_what_an_unknown_function_takes_lies_before_the_first_of_what_it_saves() -> None:
    trace = saving_step(1.0, 0.1, 0.2, 0.4)  # of the three, the first is saved twice
    storages = (*trace.storages[:2], replace(trace.storages[2], value=-1))
    measured = [0.1, 0.0, 6.0, 1e-6, 0.0]  # it saved what the second operation made, and then something of its own
    unknown = replace(trace, storages=storages, ops=trace.ops[:2], values=trace.values[:2])
    assert forward_of_operations(unknown, measured) == pytest.approx([0.1, 0.0, 6.0, 0.0, 0.0], rel=1e-4)


def test_what_is_unknown_is_late_with_what_is_known() -> None:
    trace = saving_step(0.2, 0.1, 0.2, 0.4)
    storages = (*trace.storages[:2], replace(trace.storages[2], value=-1))
    unknown = replace(trace, storages=storages, ops=trace.ops[:2], values=trace.values[:2])
    measured = [0.2, 0.2, 0.2, 0.6, 0.0]  # of the 0.6 s beside it, operations take 0.3
    found = forward_of_operations(unknown, measured)
    assert found == pytest.approx([0.1, 0.0, 0.2, 0.3, 0.0])
    stretched = with_forward(unknown, found or [], 6.0)
    again = forward_of_operations(stretched)
    assert again == pytest.approx(found), "however often a forward is made as long as its host takes"


def test_operations_tell_nothing_where_they_made_nothing_of_what_is_saved_or_run_on_a_cpu() -> None:
    assert forward_of_operations(saving_step(1.0, 0.1, 0.2, is_known=False)) is None
    assert forward_of_operations(saving_step(1.0, 0.1, 0.2, device="cpu")) is None


def test_a_forward_in_which_a_gpu_waited_for_marks_takes_what_its_operations_do() -> None:
    late = without_waiting(saving_step(1.0, 0.1, 0.2, 0.4))
    assert [one.compute_s for one in late.moments] == [0.1, 0.0, 0.2, 0.4, 0.0, 0.5, 0.5, 0.5]
    in_time = saving_step(0.15, 0.1, 0.2, 0.4)
    assert without_waiting(in_time) is in_time


def test_a_host_that_is_faster_has_time_to_spare_and_a_slower_one_sets_the_pace() -> None:
    assert beside_the_host([1.0, 2.0], 2.0) == ([1.0, 2.0], 1.0)
    assert beside_the_host([1.0, 2.0], 6.0) == ([2.0, 4.0], 0.0)


def test_a_long_operation_at_the_end_gives_the_host_no_time_before_it() -> None:
    blocks = [1.0] * 19
    assert spare_s([*blocks, 50.0], 5.0) == pytest.approx(20 - 5)
    assert spare_s([*blocks, 0.0], 5.0) == pytest.approx(19 - 5)
    assert spare_s([*blocks, 50.0], 25.0) == 0.0
    assert spare_s([], 0.0) == 0.0


def test_a_compiled_block_that_was_timed_ran_in_the_interval_before_its_first_save() -> None:
    trace = saving_step(1.0, 0.1, 0.2, 0.4, is_known=False)
    assert forward_of_operations(trace) is None
    in_blocks = [replace(one, block=name) for one, name in zip(trace.storages, ("h.0", "h.1.mlp", "h.1"), strict=True)]
    outside = replace(trace.ops[0], compute_s=0.25, outputs=())  # after all of them
    times = (("h.0", 0.3), ("h.1", 0.5), ("h.2", 9.0))
    timed = replace(trace, storages=tuple(in_blocks), ops=(outside,), blocks_s=times)
    ats = [one.made - 1 for one in in_blocks]
    expected = [0.0] * trace.turn
    expected[ats[0]], expected[ats[1]] = 0.3, 0.5
    assert forward_of_operations(timed) == expected
    assert forward_of_operations(replace(timed, ops=())) is None, "nobody knows what else there was"
    expected[ats[1]] = expected[ats[2]] = 1.0 * 0.3 / 3.0  # as late as the block that was timed, and what is beside it
    assert forward_of_operations(replace(timed, blocks_s=(("h.0", 0.3),))) == pytest.approx(expected)


def test_what_was_compiled_in_backward_is_not_taken_for_the_models_work() -> None:
    moments = [moment(1e-3)] * 20 + [moment(1e-3, kind=UNPACK)] * 20
    assert without_compilation(trace_of(moments)).moments == tuple(moments), "no blocks are known"
    trace = trace_of(moments)
    moments[trace.turn + 1] = moment(2.0, kind=UNPACK)
    found = without_compilation(replace(trace_of(moments), blocks_s=(("a", 4e-3), ("b", 4e-3)))).moments
    moments[trace.turn + 1] = moment(0.25 * 3 * 8e-3, kind=UNPACK)
    assert [one.compute_s for one in found] == pytest.approx([one.compute_s for one in moments])


def test_what_was_compiled_in_forward_is_not_taken_for_the_models_work() -> None:
    trace = saving_step(0.8, 0.1, 0.2, 0.4, is_known=False)
    names = ("h.0", "h.1", "h.2")
    storages = [replace(one, block=name) for one, name in zip(trace.storages, names, strict=True)]
    ats = [one.made - 1 for one in storages]
    moments = [replace(one, compute_s=9.0) if at in ats[:2] else one for at, one in enumerate(trace.moments)]
    moments[-1] = replace(moments[-1], compute_s=7.0)
    moments[ats[2]] = replace(moments[ats[2]], compute_s=0.31)  # hardly more than it takes by itself
    blocks_s = (("h.0", 0.3), ("h.1", 0.5), ("h.2", 0.3), ("none of which anything was saved", 0.1))
    found = without_compilation(
        replace(trace, storages=tuple(storages), moments=tuple(moments), blocks_s=blocks_s)
    ).moments
    moments[ats[0]], moments[ats[1]] = replace(moments[ats[0]], compute_s=0.3), replace(moments[ats[1]], compute_s=0.5)
    moments[-1] = replace(moments[-1], compute_s=0.25 * 3 * 1.2)
    assert [one.compute_s for one in found] == pytest.approx([one.compute_s for one in moments])
