"""Says where the time of a Session's steps goes: per step, in the GPU's gaps, and in Python.

    python3 tools/step_times.py llama-1.1b --budget checkpoint --compiled --random-lengths --seconds 40

Trains a model of `torchstorm bench models`, everything kept, with its own checkpointing, and with a Session. Of the
Session it prints every step while it settles (with `--slow-steps` also where the host was in those that took long, at
the price of other plans; with `--plans` what each took by its plan, and by what times better ones are searched for and
taken over); of each way the median of ten, whose sizes have been seen, per full batch; what the GPU's
kernels take in one step and why it did nothing in between (the host was late, or a copy was waited for); and where the
step's threads are in Python when they are looked at every half millisecond: in which functions of ours, in which of
others, and where they stood still for long. Gradients are not checked. A tool for those who make a step faster: it
takes part of the host's time itself, so `torchstorm bench models` alone says how long steps take.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from torchstorm.bench.measure import Context, Training, clean, synchronize
from torchstorm.bench.model_cases import ON_A_CPU, ON_A_GPU, ModelCase, checkpointing_of, make_model
from torchstorm.bench.ways import keep_everything
from torchstorm.offload.native import library
from torchstorm.offload.session import Session
from torchstorm.offload.step.clock import Took
from torchstorm.plan.forecast import DISK, RAM
from torchstorm.plan.plan import Plan
from torchstorm.plan.recompute import replays
from torchstorm.plan.trace import Trace

_NUM_TIMED, _NUM_LATEST = 10, 6
_LATE_NS = 2_000  # a launch that ends so little before the gap does
_SMALL_NS = 4_000  # between two kernels that follow each other
_STILL_S = 2e-3  # a thread that is seen at one place for so long stands still
_TIMED_SEED = 10**6


class Steps:
    """Runs steps of a model and takes their times."""

    def __init__(self, case: ModelCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self.training: Training = make_model(case, device)
        self.phase = ""  # which part of a step runs
        self.seed = 0
        self.highest_gib = 0.0  # of any step since whoever reads it has set it to 0

    def run(self, context: Context, seed: int | None = None) -> tuple[float, float, float, float]:
        """One step: milliseconds in all, of the host in forward and in backward, and GiB at the peak."""
        training, on_gpu = self.training, self.device.type == "cuda"
        if seed is None:
            self.seed += 1
        batch = training.data(self.seed if seed is None else seed)
        synchronize(self.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.perf_counter()
        self.phase = "entry"
        with context():
            self.phase = "forward"
            loss = training.loss(batch)
            turn = time.perf_counter()
            self.phase = "backward"
            loss.backward()
            self.phase = "end"
            end = time.perf_counter()
        self.phase = ""
        assert training.optimizer is not None
        training.optimizer.step()
        training.model.zero_grad(set_to_none=True)
        synchronize(self.device)
        took = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if on_gpu else 0.0
        self.highest_gib = max(self.highest_gib, peak)
        return took * 1e3, (turn - begin) * 1e3, (end - turn) * 1e3, peak

    def run_timed(self, context: Context) -> list[tuple[float, float, float, float]]:
        """Some steps, the same each time."""
        return [self.run(context, _TIMED_SEED + number) for number in range(_NUM_TIMED)]

    def show(self, name: str, context: Context) -> float:
        """Prints the medians of the timed steps, per full batch; returns the highest peak in GiB."""
        shares = [self.case.share(_TIMED_SEED + number) for number in range(_NUM_TIMED)]
        if self.case.has_random_sizes:
            new = [one[0] / share for one, share in zip(self.run_timed(context), shares, strict=True)]
            print(f"{name}: step {statistics.median(new):.1f} ms the first time, when lengths may be new", flush=True)
        all_of = self.run_timed(context)
        step, forward, backward = (
            statistics.median(one[at] / share for one, share in zip(all_of, shares, strict=True)) for at in range(3)
        )
        peak = max(one[3] for one in all_of)
        print(f"{name}: step {step:.1f} ms, host {forward:.1f} + {backward:.1f} ms, peak {peak:.2f} GiB", flush=True)
        return peak

    def settle(self, session: Session, seconds: float, *, looks_at_slow: bool) -> None:
        """Prints steps for so long: the size, milliseconds, peak, and how many have followed a plan; if asked to,
        also where the host was in those that took half as long again as they do in the end. Of a step that the Session
        measures, the peak is that of its last part: `highest peak of any step` has all of it."""
        stop, said, seen = time.perf_counter() + seconds, list[str](), list[tuple[float, dict[str, Look]]]()
        while time.perf_counter() < stop:
            watch = looking(self) if looks_at_slow else contextlib.nullcontext(dict[str, Look]())
            with watch as looks:
                took, _, _, peak = self.run(session.step)
            seen.append((took / self.case.share(self.seed), looks))
            num_planned = session.report().num_planned
            said.append(f"{self.case.share(self.seed):.2f}: {took:.0f} at {peak:.3f} GiB ({num_planned})")
            if len(said) == 10:
                print("  " + ", ".join(said), flush=True)
                said.clear()
        print("  " + ", ".join(said))
        if looks_at_slow:
            _show_slow(seen)


def _show_slow(seen: list[tuple[float, dict[str, Look]]]) -> None:
    """Prints where the host was in steps that took long, all but the first."""
    usual = statistics.median(took for took, _ in seen[len(seen) // 2 :])
    for number, (took, looks) in enumerate(seen):
        if number and took > 1.5 * usual:
            places = [
                f"{phase}: {count / look.ours.total():.0%} of {look.seconds * 1e3:.0f} ms in {name}"
                for phase, look in looks.items()
                for name, count in look.ours.most_common(4)
            ]
            print(f"    step {number}, {took:.0f} ms: " + "; ".join(places), flush=True)


def show_plans(session: Session) -> None:
    """From now on prints what every step took by the plan in force, which better plan is searched for, by what times of
    the model, and which takes over."""
    planner = session._shared.planner
    search, take, plan_within = planner._search_beside, planner.take_better, planner.plan_within
    judge, choose = planner.judge, planner.take_choice

    def searched(beside: Any, planned: Any, plan: Plan, trace: Trace, *rest: Any, limit_s: float, **more: Any) -> None:
        search(beside, planned, plan, trace, *rest, limit_s=limit_s, **more)
        least = (
            f"less than {planned.asked.than_s * 1e3:.1f} ms at a part of the link, {planned.forecast.step_ms:.1f} now"
        )
        print(f"    searched for {limit_s:.1f} s: {least}; {_times_of(trace)}", flush=True)

    def planned_within(slack_bytes: int, trace: Trace, *rest: Any, **more: Any) -> Any:
        planned = plan_within(slack_bytes, trace, *rest, **more)
        print(f"    planned: {planned.forecast.step_ms:.1f} ms; {_told(planned.plan)}; {_times_of(trace)}", flush=True)
        return planned

    def taken() -> bool:
        is_another = take()
        plan = session.plan()
        if is_another and plan is not None:
            print(f"    taken over: {plan.forecast.step_ms:.1f} ms; {_told(plan)}", flush=True)
        return is_another

    def judged(planned: Any, took: Took) -> Any:
        named = zip(Took._fields, took, strict=True)
        said = (f"{name} {seconds * 1e3:.1f}" for name, seconds in named if seconds is not None)
        print(f"    took {', '.join(said)} (ms)", flush=True)
        return judge(planned, took)

    def chosen() -> Any:
        found = choose()
        choice = found[2]
        mix = ", ".join(f"{number} {name}" for name, number in Counter(choice.variants.values()).items())
        print(f"    chosen: {mix}; {choice.step_ms} ms, {choice.measured_ms} now", flush=True)
        return found

    patched = {"judge": judged, "take_choice": chosen, "plan_within": planned_within}
    vars(planner).update(_search_beside=searched, take_better=taken, **patched)


def _times_of(trace: Trace) -> str:
    """What the model alone takes by a trace."""
    forward, backward = trace.forward_s, trace.compute_s - trace.forward_s
    blocks_ms = sum(seconds for _, seconds in trace.blocks_s) * 1e3
    return (
        f"forward {forward * 1e3:.1f} (compiled blocks alone {blocks_ms:.1f}), backward {backward * 1e3:.1f}, "
        f"host to spare {trace.host.idle_s * 1e3:.1f} ms"
    )


def _told(plan: Plan) -> str:
    """How much a plan moves and computes again."""
    again = replays(plan.trace, plan.placements) or {}
    num_ops, again_s = sum(len(one.ops) for one in again.values()), sum(one.compute_s for one in again.values())
    moved = (plan.moved_bytes(RAM) + plan.moved_bytes(DISK)) / 2**30
    return f"{plan.num_moved} moved, {moved:.2f} GiB; {num_ops} operations again, {again_s * 1e3:.1f} ms"


def show_gaps(steps: Steps, context: Context) -> None:
    """Prints what a GPU's kernels take in a step, and what was between them."""
    if steps.device.type != "cuda":
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps.run(context, _TIMED_SEED)
    launched: dict[int, int] = {}
    kernels: list[tuple[int, int, int, str]] = []
    copies_ns: Counter[str] = Counter()
    for event in profiler.profiler.kineto_results.events():
        begin, end, name = event.start_ns(), event.start_ns() + event.duration_ns(), event.name()
        if event.device_type().name != "CUDA":
            launched[event.correlation_id()] = end
        elif "memcpy" in name.lower() and "DtoD" not in name:
            copies_ns[name] += end - begin
        elif event.correlation_id():
            kernels.append((begin, end, event.correlation_id(), name))
    kernels.sort()
    late = waited = small = 0
    latest: list[tuple[int, int, str]] = []
    by_name: Counter[str] = Counter()
    until = kernels[0][0]
    for begin, end, number, name in kernels:
        gap = begin - until
        if 0 < gap < _SMALL_NS:
            small += gap
        elif gap > 0 and launched.get(number, 0) > until - _LATE_NS:
            late += gap
            latest.append((gap, until - kernels[0][0], name))
        elif gap > 0:
            waited += gap
        until = max(until, end)
        by_name[name[:60]] += end - begin
    busy, whole = sum(by_name.values()), until - kernels[0][0]
    gaps = f"host late {late / 1e6:.1f}, waits {waited / 1e6:.1f}, small gaps {small / 1e6:.1f}"
    copies = ", ".join(f"{name} {ns / 1e6:.1f}" for name, ns in copies_ns.items())
    for gap, at, name in sorted(latest, reverse=True)[:_NUM_LATEST]:
        print(f"    late by {gap / 1e6:.2f} ms at {at / 1e6:.1f} ms, for {name[:90]}")
    print(f"  kernels {busy / 1e6:.1f} of {whole / 1e6:.1f} ms; {gaps}; {copies}")
    print("  " + "; ".join(f"{name} {ns / 1e6:.1f}" for name, ns in by_name.most_common(12)), flush=True)


class Look:
    """Where one thread of a step is, as it is seen time after time."""

    def __init__(self) -> None:
        self.ours: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.still_s: dict[str, float] = {}
        self.seconds = 0.0  # from the first look to the last
        self._began_s = 0.0
        self._place: tuple[int, int] = (0, 0)
        self._since_s = self._seen_s = 0.0

    def take(self, frame: Any) -> None:
        """Looks once."""
        now_s, place, name = time.perf_counter(), (id(frame), frame.f_lasti), _ours(frame)
        self._began_s = self._began_s or now_s
        self.seconds = now_s - self._began_s
        self.ours[name] += 1
        inner = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        self.others[inner] += 1
        is_later = now_s - self._seen_s > _STILL_S  # another step, maybe: it was not seen in between
        self._seen_s = now_s
        if place != self._place or is_later:
            self._place, self._since_s = place, now_s
        elif now_s - self._since_s > _STILL_S:
            at = f"{inner} < {name}"
            self.still_s[at] = self.still_s.get(at, 0.0) + now_s - self._since_s
            self._since_s = now_s

    def show(self, num_steps: int) -> None:
        """Prints what was seen."""
        for seen in self.ours, self.others:
            for name, count in seen.most_common(15):
                print(f"    {count / max(1, seen.total()):6.1%} {name}", flush=True)
            print()
        for name, took_s in sorted(self.still_s.items(), key=lambda one: -one[1])[:8]:
            print(f"    stood still {took_s / num_steps * 1e3:.1f} ms a step in {name}", flush=True)


@contextlib.contextmanager
def looking(steps: Steps) -> Iterator[dict[str, Look]]:
    """Looks at the threads of the steps that run inside."""
    looks = {phase: Look() for phase in ("entry", "forward", "backward", "end")}
    main, stop = threading.get_ident(), threading.Event()

    def look_once(phase: str, me: int) -> None:  # frames, with the tensors in them, are let go at its end
        for thread, frame in sys._current_frames().items():
            is_planner = frame.f_code.co_qualname == "_Run._speak"  # which waits for the process that plans
            if thread != me and (thread == main) == (phase != "backward") and not is_planner:
                looks[phase].take(frame)

    def look() -> None:
        while not stop.wait(0.0005):
            if steps.phase in looks:
                look_once(steps.phase, threading.get_ident())

    thread, interval = threading.Thread(target=look, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    thread.start()
    try:
        yield looks
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def show_python(steps: Steps, context: Context) -> None:
    """Prints which functions the step's threads were seen in, innermost first."""
    with looking(steps) as looks:
        steps.run_timed(context)
    for phase, look_of in looks.items():
        print(f"  {phase}:")
        look_of.show(_NUM_TIMED)


def _ours(frame: Any) -> str:
    names: list[str] = []
    while frame is not None and len(names) < 3:
        code = frame.f_code
        if "/torchstorm/" in code.co_filename and "/bench/" not in code.co_filename:
            names.append(code.co_qualname)
        frame = frame.f_back
    return " < ".join(names) or "none of ours"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cases = {case.name: case for case in (ON_A_GPU if device.type == "cuda" else ON_A_CPU)}
    parser.add_argument("model", choices=cases)
    parser.add_argument("--budget", choices=("checkpoint", "middle", "unlimited"), default="checkpoint")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--random-lengths", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0, help="while the Session settles")
    parser.add_argument("--slow-steps", action="store_true", help="say where the host was in steps that took long")
    parser.add_argument(
        "--plans", action="store_true", help="say how plans follow each other while the Session settles"
    )
    given = parser.parse_args()
    steps = Steps(replace(cases[given.model], has_random_sizes=given.random_lengths), device)
    steps.run(keep_everything)
    kept = steps.show("everything kept", keep_everything)
    show_gaps(steps, keep_everything)
    checkpointing = checkpointing_of(steps.training.model)
    least = kept
    if checkpointing is not None:
        with checkpointing(None):
            least = steps.show("own checkpointing", keep_everything)
            show_gaps(steps, keep_everything)
            show_python(steps, keep_everything)
    clean(device)
    budget = {"checkpoint": least, "middle": (least + kept) / 2, "unlimited": 0.0}[given.budget]
    # On a CPU, whose peak is not taken, all is kept, too.
    options: dict[str, Any] = {"vram": int(budget * 2**30)} if budget else {"unlimited": True}
    with Session(steps.training.model, optimizer=steps.training.optimizer, **options) as session:
        blocks = session.compile() if given.compiled else None
        library.wait()
        steps.highest_gib = 0.0
        if given.plans:
            show_plans(session)
        steps.settle(session, given.seconds, looks_at_slow=given.slow_steps)
        steps.show(f"Session, {budget:.3f} GiB", session.step)
        show_gaps(steps, session.step)
        show_python(steps, session.step)
        plan, report = session.plan(), session.report()
        tiers = Counter(one.tier for one in plan.placements) if plan is not None else {}
        print(f"  plan: {dict(tiers)}; moved {report.moved_bytes / 2**30:.2f} GiB; {report.forecast}")
        highest = report.highest.vram_bytes / 2**30 if report.highest is not None else 0.0
        print(f"  highest peak of any step: {max(steps.highest_gib, highest):.3f} GiB")
        print("\n".join(f"  {note}" for note in report.notes))
        if blocks is not None:
            for table in blocks.tables()[:1]:
                for name, one in table.variants.items():
                    seconds = f"{one.forward_s * 1e3:.2f} + {one.backward_s * 1e3:.2f} ms alone"
                    print(f"  {name}: {one.saved_bytes / 2**20:.0f} MiB, {seconds}")
            blocks.undo()


if __name__ == "__main__":
    main()
