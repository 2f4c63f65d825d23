"""A variant for every block: traces rewritten for another mix, and the mix that is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstorm.plan.choose import Blocks, choose_variants
from torchstorm.plan.forecast import KEEP, Placement, fast_profile
from torchstorm.plan.machine import Machine
from torchstorm.plan.mixed import as_measured, mixed_trace, warm_trace
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.solve import solve
from torchstorm.plan.trace import ENTER, PACK, UNPACK, Moment, Op, SavedStorage, Trace, make_parcels
from torchstorm.plan.variants import CHEAP, INPUTS, LEAN, LEAST, SAVE, VARIANTS, BlockTable, Variant

MIB = 2**20
SIZES = {SAVE: (6, 2, 8, 8), CHEAP: (6, 2, 8), LEAN: (6, 2), INPUTS: (2,), LEAST: (1,)}  # in half a MiB
FLOPS = {SAVE: 0, CHEAP: 0, LEAN: 400, INPUTS: 700, LEAST: 900}
FORWARD_S, BACKWARD_S, RATE = 0.010, 0.020, 1e5  # 1000 floating-point operations take the forward
MACHINE = Machine(
    name="m", device="cuda:0", vram_bytes=2**40, ram_bytes=2**40, d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9
)


def variant(name: str, *, scale: int = MIB) -> Variant:
    sizes = tuple(size * scale // 2 for size in SIZES[name])
    return Variant(name=name, sizes=sizes, backward_flops=FLOPS[name], peak_bytes=14 * scale)


def table(number: int) -> BlockTable:
    return BlockTable(name=f"h.{number}", variants={name: variant(name) for name in VARIANTS}, forward_flops=1000)


def trace_of(mix: list[str], *, device: str = "cuda", slow_first: float = 1.0) -> Trace:
    """A step of equal blocks, each of which saves what its variant says: first all packs, then all unpacks."""
    events: list[tuple[str, int, float, int]] = [(ENTER, -1, FORWARD_S * slow_first, 0)]
    storages: list[list[int]] = []
    numbers = []
    for block, name in enumerate(mix):
        own = []
        for size in SIZES[name]:
            own.append(len(storages))
            storages.append([size * MIB // 2, len(events), 0, block])
            events.append((PACK, own[-1], 0.0, size * MIB // 2))
        last = block == len(mix) - 1
        kind, number, _, nbytes = events[-1]
        events[-1] = (kind, number, 0.0 if last else FORWARD_S, nbytes)
        numbers.append(own)
    for block in reversed(range(len(mix))):
        for number in numbers[block]:
            storages[number][2] = len(events)
            events.append((UNPACK, number, 0.0, storages[number][0]))
        kind, number, _, nbytes = events[-1]
        again = FLOPS[mix[block]] / RATE
        events[-1] = (kind, number, (BACKWARD_S + again) * (slow_first if not block else 1.0), nbytes)
    freed = [max(storages[number][2] for number in own) + 1 for own in numbers]
    parcels = tuple(
        SavedStorage(nbytes=n, made=made, owned=made, needed=needed, freed=freed[block], parcel=i, block=f"h.{block}")
        for i, (n, made, needed, block) in enumerate(storages)
    )
    working = {block: 14 * MIB - sum(SIZES[name]) * MIB // 2 for block, name in enumerate(mix)}
    moments = tuple(
        Moment(
            kind=kind,
            storage=number,
            nbytes=nbytes,
            compute_s=seconds,
            other_bytes=working[storages[number][3]] if kind == UNPACK and seconds and device == "cuda" else 0,
        )
        for kind, number, seconds, nbytes in events
    )
    return Trace(
        device=device,
        moments=moments,
        storages=parcels,
        parcels=make_parcels(parcels, [storage.nbytes for storage in parcels]),
        base_bytes=0,
        staging_bytes=0,
    )


def names(mix: list[str]) -> dict[str, str]:
    return {f"h.{number}": name for number, name in enumerate(mix)}


def rewritten(before: list[str], after: list[str], device: str = "cuda") -> Trace:
    tables = [table(number) for number in range(len(before))]
    trace = trace_of(before, device=device)
    return mixed_trace(trace, tables, names(before), names(after), memory_bytes_per_s=1e12)


MIXES = st.lists(st.tuples(st.sampled_from(VARIANTS), st.sampled_from(VARIANTS)), min_size=1, max_size=5)


@given(pairs=MIXES, device=st.sampled_from(["cpu", "cuda"]))
def test_a_rewritten_trace_has_the_bytes_and_times_of_a_step_in_those_variants(
    pairs: list[tuple[str, str]], device: str
) -> None:
    before, after = [one for one, _ in pairs], [other for _, other in pairs]
    found, expected = rewritten(before, after, device), trace_of(after, device=device)
    assert found.saved_bytes == expected.saved_bytes
    assert found.compute_s == pytest.approx(expected.compute_s)
    assert sorted(p.nbytes for p in found.parcels) == sorted(p.nbytes for p in expected.parcels)
    peaks = [int(fast_profile(t, [Placement(tier=KEEP)] * len(t.parcels)).max()) for t in (found, expected)]
    assert peaks[0] == peaks[1]
    for storage in found.storages:
        assert storage.made < storage.needed < storage.freed <= found.num_moments
        assert found.moments[storage.made].kind == PACK
        assert found.moments[storage.needed].kind == UNPACK


@given(pairs=MIXES, tokens=st.integers(10, 400))
def test_variants_compiled_for_other_sizes_are_rewritten_as_those_of_the_steps_sizes(
    pairs: list[tuple[str, str]], tokens: int
) -> None:
    before, after = [one for one, _ in pairs], [other for _, other in pairs]
    trace = trace_of(before)
    scale = MIB // 128 * tokens  # the step has 128
    compiled = [
        BlockTable(
            name=f"h.{number}", variants={name: variant(name, scale=scale) for name in VARIANTS}, forward_flops=1000
        )
        for number in range(len(before))
    ]
    tables = [as_measured(trace, one, name) for one, name in zip(compiled, before, strict=True)]
    found = mixed_trace(trace, tables, names(before), names(after), memory_bytes_per_s=1e12)
    expected = trace_of(after)
    assert found.saved_bytes == expected.saved_bytes
    assert found.compute_s == pytest.approx(expected.compute_s, rel=2e-3)  # operations are rounded
    assert sorted(p.nbytes for p in found.parcels) == sorted(p.nbytes for p in expected.parcels)


def test_a_blocks_input_is_not_taken_for_what_it_saves_of_other_sizes() -> None:
    small = variant(LEAST, scale=256)
    one = BlockTable(name="h.0", variants={LEAST: small, SAVE: variant(SAVE)}, forward_flops=1000)
    trace = trace_of([SAVE])  # the largest of which stands for the input
    sizes = [small.sizes[0], *(storage.nbytes for storage in trace.storages[1:])]
    storages = tuple(replace(s, nbytes=size) for s, size in zip(trace.storages, sizes, strict=True))
    assert as_measured(replace(trace, storages=storages), one, LEAST) is one


def test_a_variant_is_of_the_steps_sizes_though_one_of_them_differs() -> None:
    sizes = 25 * MIB, 5 * MIB
    one = BlockTable(name="h.0", variants={SAVE: Variant(name=SAVE, sizes=sizes)}, forward_flops=1000)
    trace = trace_of([SAVE])
    found = 25 * MIB, 4 * MIB, MIB // 2, MIB // 10  # the last two are what the variant would save at a 50th
    storages = tuple(replace(s, nbytes=size) for s, size in zip(trace.storages, found, strict=True))
    assert as_measured(replace(trace, storages=storages), one, SAVE) is one


def test_the_same_mix_leaves_the_trace_as_it_is() -> None:
    assert rewritten([CHEAP, SAVE], [CHEAP, SAVE]) == trace_of([CHEAP, SAVE])


@pytest.mark.parametrize("mix", [[CHEAP] * 4, [INPUTS, INPUTS, SAVE, SAVE], [CHEAP, CHEAP, CHEAP, LEAN]])
def test_a_block_that_was_compiled_meanwhile_is_taken_to_be_as_fast_as_the_others(mix: list[str]) -> None:
    slow = trace_of(mix, slow_first=500.0)
    warm = warm_trace(slow, [table(number) for number in range(4)], names(mix))
    assert warm.compute_s == pytest.approx(trace_of(mix).compute_s)


def test_two_graphs_of_one_block_save_together() -> None:
    both = variant(LEAN).then(variant(LEAN))
    assert both.saved_bytes == 2 * variant(LEAN).saved_bytes
    assert both.peak_bytes == 14 * MIB + variant(LEAN).saved_bytes


def chosen(num_blocks: int, vram: int, *, ram: int = 0) -> tuple[dict[str, str], Plan | None]:
    trace = trace_of([CHEAP] * num_blocks)
    plans, in_vain = list[Plan](), list[bool]()

    def plan_of(mixed: Trace) -> Plan:
        best_ms = min((plan.forecast.step_ms for plan in plans), default=math.inf)
        in_vain.append(mixed.compute_s * 1e3 >= best_ms)
        plans.append(solve(mixed, MACHINE, Budget(vram=vram, ram=ram)))
        return plans[-1]

    tables = [table(number) for number in range(num_blocks)]
    blocks = Blocks(tables=tables, measured=names([CHEAP] * num_blocks), memory_bytes_per_s=1e12)
    choice = choose_variants(trace, blocks, plan_of)
    best = min((plan for plan in plans), key=lambda plan: plan.forecast.step_ms, default=None)
    assert choice.num_tried <= 70
    assert sum(in_vain) <= in_vain[-1], (
        "but for what the step was measured in, no mix that computes too long is planned"
    )
    assert (choice.step_ms is None) == (best is None)
    if best is not None and choice.step_ms is not None:
        assert choice.step_ms <= best.forecast.step_ms * 1.01
    return choice.variants, best


def test_where_everything_fits_nothing_runs_again() -> None:
    variants, _ = chosen(6, 200 * MIB)
    assert set(variants.values()) <= {SAVE, CHEAP}


def test_where_nothing_can_move_first_blocks_save_less_than_last_ones() -> None:
    variants, best = chosen(8, 60 * MIB)
    leanness = [VARIANTS.index(name) for name in variants.values()]
    assert leanness == sorted(leanness, reverse=True)
    assert len(set(leanness)) > 1
    assert best is not None
    assert best.forecast.vram_bytes <= 60 * MIB


def test_a_fast_link_spares_computing_again() -> None:
    without, _ = chosen(8, 60 * MIB)
    with_link, _ = chosen(8, 60 * MIB, ram=2**40)
    again = [sum(FLOPS[name] for name in variants.values()) for variants in (without, with_link)]
    assert again[1] < again[0]


def test_where_nothing_fits_every_block_is_as_lean_as_it_can_be() -> None:
    variants, best = chosen(4, 2 * MIB)
    assert set(variants.values()) == {LEAST}
    assert best is None


def test_a_variant_that_a_block_does_not_have_is_the_next_that_saves_more() -> None:
    only = BlockTable(name="h.0", variants={SAVE: variant(SAVE), LEAN: variant(LEAN)}, forward_flops=1)
    assert [only.nearest(name).name for name in VARIANTS] == [SAVE, SAVE, LEAN, LEAN, LEAN]


def test_a_block_without_a_variant_takes_the_next_that_saves_more_and_else_the_one_that_saves_most() -> None:
    found = BlockTable(name="h.0", variants={name: variant(name) for name in (CHEAP, INPUTS)}, forward_flops=1000)
    assert [found.nearest(name).name for name in VARIANTS] == [CHEAP, CHEAP, CHEAP, INPUTS, INPUTS]


HEAD = Op(name="mean", compute_s=0.0, scratch_bytes=0, inputs=(), outputs=())  # something that is in no block


def timed_table(number: int, names_timed: Sequence[str] = VARIANTS) -> BlockTable:
    """As `table`; its variants, or some, were timed: forward takes half, and backward a fifth of what it computes again
    more."""
    variants = dict(table(number).variants)
    for name in names_timed:
        backward_s = BACKWARD_S + variants[name].backward_flops / RATE * 1.2
        variants[name] = replace(variants[name], forward_s=FORWARD_S / 2, backward_s=backward_s)
    return replace(table(number), variants=variants)


def test_blocks_that_were_timed_take_in_another_variant_what_that_differs_by() -> None:
    before, after = [SAVE, CHEAP, CHEAP], [LEAN, INPUTS, CHEAP]
    tables = [timed_table(number) for number in range(3)]
    found = mixed_trace(trace_of(before), tables, names(before), names(after), memory_bytes_per_s=1e12)
    more_s = (FLOPS[LEAN] + FLOPS[INPUTS]) / RATE * 1.2
    assert found.compute_s == pytest.approx(trace_of(before).compute_s + more_s)


def test_a_variant_that_was_not_timed_takes_what_lies_between_those_that_were() -> None:
    before, after = [CHEAP, CHEAP], [LEAN, INPUTS]
    tables = [timed_table(number, (CHEAP, LEAST)) for number in range(2)]
    found = mixed_trace(trace_of(before), tables, names(before), names(after), memory_bytes_per_s=1e12)
    more_s = (FLOPS[LEAN] + FLOPS[INPUTS]) / RATE * 1.2
    assert found.compute_s == pytest.approx(trace_of(before).compute_s + more_s)


def test_a_variant_beyond_those_that_were_timed_is_reckoned_from_the_nearest() -> None:
    before, after = [CHEAP, CHEAP], [LEAST, SAVE]
    tables = [timed_table(number, (CHEAP, LEAN)) for number in range(2)]
    found = mixed_trace(trace_of(before), tables, names(before), names(after), memory_bytes_per_s=1e12)
    alone = FORWARD_S / 2 / 1000  # seconds a floating-point operation of a block by itself
    more_s = FLOPS[LEAN] / RATE * 1.2 + (FLOPS[LEAST] - FLOPS[LEAN]) * alone - (FLOPS[CHEAP] - FLOPS[SAVE]) * alone
    assert found.compute_s == pytest.approx(trace_of(before).compute_s + more_s)


def test_a_variant_that_was_not_timed_computes_again_at_the_speed_that_its_block_has_by_itself() -> None:
    before, after = [CHEAP, CHEAP], [LEAN, CHEAP]
    tables = [
        replace(one, variants={CHEAP: replace(one.variants[CHEAP], forward_s=FORWARD_S / 2), LEAN: one.variants[LEAN]})
        for one in map(table, range(2))
    ]
    found = mixed_trace(trace_of(before), tables, names(before), names(after), memory_bytes_per_s=1e12)
    assert found.compute_s == pytest.approx(trace_of(before).compute_s + FLOPS[LEAN] / (2 * RATE))


@pytest.mark.parametrize("late", [1.1, 4.0])
def test_blocks_for_which_a_gpu_has_waited_take_what_they_take_alone(late: float) -> None:
    mix = [LEAN, CHEAP]
    trace = trace_of(mix)
    slow = replace(trace, moments=tuple(replace(one, compute_s=one.compute_s * late) for one in trace.moments))
    tables = [
        replace(one, variants={name: replace(each, forward_s=FORWARD_S) for name, each in one.variants.items()})
        for one in map(timed_table, range(2))
    ]
    tables.append(table(1))  # was not timed
    tables[1] = replace(tables[1], name="h.2")  # has not run
    blocks = Blocks(tables=tables, measured={**names(mix), "h.2": CHEAP}, memory_bytes_per_s=1e12)
    found = blocks.timed_alone(slow, {"h.0", "h.1", "h.2"})
    assert found.blocks_s == (("h.0", FORWARD_S),)
    assert not blocks.timed_alone(slow, {"h.1"}).blocks_s, "it was called more than once"
    own_s = BACKWARD_S + FLOPS[LEAN] / RATE * 1.2
    backward = [one.compute_s for one in found.moments[found.turn :] if one.compute_s]
    assert backward[0] == pytest.approx(BACKWARD_S * late)  # of the second block
    assert backward[1] == pytest.approx(own_s if late > 1.25 * 1.2 else (BACKWARD_S + FLOPS[LEAN] / RATE) * late)
    all_timed = replace(blocks, tables=[tables[0], replace(tables[1], name="h.1")])
    with_head = replace(slow, ops=(HEAD,))
    found = all_timed.timed_alone(with_head, {"h.0", "h.1"})
    assert found.forward_s == pytest.approx(2 * FORWARD_S * (late if late < 1.25 else 1.0))


def test_times_of_a_block_rise_with_its_sizes() -> None:
    one = replace(variant(CHEAP), forward_s=0.5, backward_s=2.0).scaled(Fraction(3, 2))
    assert (one.forward_s, one.backward_s) == (0.75, 3.0)
