"""Puts forty faults into copies of the sources, one at a time, and says which of them the tests catch.

    make mutations

Each fault changes one place of one file in a way that a mistake might: a wait that is left out, a check that is not
made, a sum in too narrow a dtype. The tests that are named with it run until the first that fails. First they run
without any fault. The exit code is 1 where a fault survives. The record: benchmarks/results/cpu/mutations.json.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[1]
COPIED = ("src", "tests", "pyproject.toml", "README.md", "docs", "examples")
LONGEST_S = 600  # a fault that makes the tests hang is caught, too


class Fault(NamedTuple):
    """One place changed.

    Attributes:
        fault: what is wrong then.
        file: below src/torchstorm.
        old, new: the text there, once, and what stands in its place.
        tests: what should fail, below tests/.
    """

    fault: str
    file: str
    old: str
    new: str
    tests: str


EXACT = "offload/test_exact.py"
OOM = "offload/test_oom.py"
SOLVE = "plan/test_solve.py"
FORECAST = "plan/test_forecast.py"
DIRECT = "storage/test_direct.py"
VOLUME = "storage/test_volume.py"
ENTROPY = "kernels/test_linear_cross_entropy.py"

FAULTS = (
    # ------------------------------------------------------------------ offload
    Fault("a copy back is not waited for", "offload/step/residency.py",
          "            parcel.back.wait()\n            parcel.back = None\n        if saved.base",
          "            parcel.back = None\n        if saved.base", EXACT),
    Fault("what changed in place since it was saved is handed back", "offload/step/residency.py",
          "if parcel.hold is not None and parcel.hold._version != saved.version:\n            saved.stale = True\n"
          "        if saved.base",
          "if saved.base", EXACT),
    Fault("twice the budget is filled", "offload/step/room.py",
          "while residency.resident_bytes + nbytes > residency.limit_bytes:",
          "while residency.resident_bytes + nbytes > 2 * residency.limit_bytes:", EXACT),
    Fault("a view comes back from the start of its storage", "offload/step/views.py",
          "tensor.storage_offset() * tensor.element_size() - base_offset", "-base_offset", EXACT),
    Fault("small tensors overlap in the buffer that they share", "offload/step/saving.py",
          "slab.filled += bytes_in_a_buffer(nbytes)", "slab.filled += nbytes // 2", EXACT),
    Fault("a random operation is computed again from another state", "offload/recompute/replay.py",
          "        generator.set_state(call.state)\n", "", "offload/test_recompute.py"),
    Fault("bytes that were computed again are not compared", "offload/step/residency.py",
          "if saved.fingerprint is not None and not torch.equal(fingerprint(row_of(content)), saved.fingerprint):",
          "if False:", "offload/test_recompute.py"),
    Fault("gradients of a step that ran out of memory stay", "offload/run/shortage.py",
          "        for tensor in self._absent:\n            tensor.grad = None\n", "", OOM),
    Fault("a repeated step starts from the buffers of the one that failed", "offload/run/snapshot.py",
          "        changed += self._put_buffers_back()\n", "", OOM),
    Fault("a split batch loses samples", "offload/run/split.py",
          "return [size + 1] * more + [size] * (num_parts - more)", "return [size] * num_parts",
          "offload/test_run.py"),
    # ------------------------------------------------------------------ plan
    Fault("what is computed again counts a moment late", "plan/forecast.py",
          "        if placement.tier == RECOMPUTE:\n            _add(edges, placement.fetch, parcel",
          "        if placement.tier == RECOMPUTE:\n            _add(edges, placement.fetch + 1, parcel", FORECAST),
    Fault("pages on a slower tier are not counted whole", "plan/forecast.py",
          "_add(edges, parcel.sealed, parcel.freed, -(-parcel.nbytes // SLOT_BYTES) * SLOT_BYTES)",
          "_add(edges, parcel.sealed, parcel.freed, parcel.nbytes)", FORECAST + " " + SOLVE),
    Fault("copies in one direction do not queue", "plan/forecast.py",
          "            idle[(leg, direction)] = start\n", "", FORECAST),
    Fault("the room that a Session needs itself is planned away", "plan/solve.py",
          "limit = getattr(budget, fast) - getattr(spare, fast)\n    _check",
          "limit = getattr(budget, fast)\n    _check", SOLVE),
    Fault("other memory is forgotten where something is computed again", "plan/solve.py",
          "still_bytes=max(0, moment.still_bytes + delta_bytes)", "still_bytes=moment.still_bytes", SOLVE),
    Fault("a slower tier that is too small is not told", "plan/solve.py",
          "    if found.slow_over_bytes:", "    if False:", SOLVE),
    Fault("memory is given back a moment early", "plan/schedule.py",
          "                self._sealed[out] + 1,", "                self._sealed[out],", SOLVE),
    Fault("what RAM has no room for goes to disk the wrong way round", "plan/schedule.py",
          "if self._slow_peak(trial) <= ram:", "if self._slow_peak(trial) >= ram:", SOLVE),
    Fault("bytes that are gone are taken for inputs", "plan/recompute.py",
          "if storage < 0 or not self._made[storage] <= moment < self._freed[storage]:",
          "if storage < 0 or not self._made[storage] <= moment:", "plan/test_recompute.py"),
    Fault("what is computed on the way is let go before it is read", "plan/recompute.py",
          "changes[(last.get(value, place) if is_read else place) + 1] -= nbytes",
          "changes[place + 1] -= nbytes", "plan/test_recompute.py"),
    # ------------------------------------------------------------------ storage
    Fault("checks are not compared", "storage/records.py", "if kept and kept != found]", "if False]", VOLUME),
    Fault("records from all over are not held against their checks", "storage/records.py",
          "        if wrong.any():", "        if False:", "storage/test_rows.py storage/test_loader.py"),
    Fault("a check lies where another one's bytes are", "storage/records.py",
          "self._start + first * CHECK_BYTES, 0", "self._start + first, 0", VOLUME),
    Fault("an unaligned read begins at the page", "storage/direct.py",
          "bounce.data_ptr() + start - first, stop - start", "bounce.data_ptr(), stop - start", DIRECT),
    Fault("a write goes on to the end of the page", "storage/direct.py",
          "tail = max(round_down(block.stop, self.align_bytes), body)",
          "tail = max(round_up(block.stop, self.align_bytes), body)", DIRECT),
    Fault("a short transfer is taken for the whole", "storage/direct.py",
          "            done += count\n", "            done = len(view)\n", DIRECT),
    Fault("a second flush says that all is well", "storage/direct.py",
          "            if self._sync_error is not None:\n                raise self._sync_error\n", "",
          DIRECT + " storage/test_faults.py"),
    Fault("a changed table is taken for the volume's", "storage/layout.py",
          "if len(table) != table_bytes or zlib.crc32(table) != table_check:", "if len(table) != table_bytes:", VOLUME),
    Fault("a request does not wait for those before it", "storage/blocks.py",
          "when_all_done(after, partial(start, request))", "start(request)", DIRECT),
    Fault("a loader that goes on reads the first batches", "storage/loader.py",
          "next_batch = self.num_given", "next_batch = 0", "storage/test_loader.py"),
    # ------------------------------------------------------------------ kernels
    Fault("the forget gate's slope is the input gate's", "kernels/mlstm/chunkwise.py",
          "df_BHS = dlog_f * torch.sigmoid(-f_BHS.double())", "df_BHS = dlog_f * torch.sigmoid(f_BHS.double())",
          "kernels/test_mlstm.py"),
    Fault("packed sequences start from the first one's states", "kernels/mlstm/chunkwise.py",
          "        group = groups.stop\n", "", "kernels/test_mlstm.py"),
    Fault("a mask lets the token behind the last one in", "kernels/mlstm/outputs_triton.py",
          "    inside = token < length\n", "    inside = token <= length\n", "kernels/test_mlstm_triton.py"),
    Fault("smoothing is left out of the gradient", "kernels/linear_cross_entropy/rows_torch.py",
          "gradient.new_full((), smooth - 1)", "gradient.new_full((), -1.0)", ENTROPY),
    Fault("only the last chunk's weight gradient counts", "kernels/linear_cross_entropy/chunks.py",
          "first=rows.start == 0)", "first=True)", ENTROPY),
    Fault("a softmax of halves is summed in halves", "kernels/linear_cross_entropy/rows_torch.py",
          "z = logits.to(wide(logits.dtype))", "z = logits.clone()", "kernels/test_cross_entropy_rows.py"),
    Fault("half a random word decides twice", "kernels/dropout/philox.py",
          "turned = (words << 16) & _WORD | words >> 16", "turned = words", "kernels/test_dropout.py"),
    Fault("a mean counts columns that are not there", "kernels/norms/forward_triton.py",
          "left = tl.where(column < N, x - first[:, None], 0.0)\n        total",
          "left = x - first[:, None]\n        total", "kernels/test_norms.py::test_triton_no_worse_than_pytorch"),
    Fault("the stabiliser of the step before is used", "kernels/slstm.py",
          "forget, write = (log_f + m - m_new).exp_(), (i - m_new).exp_()",
          "forget, write = (log_f + m - m_new).exp_(), (i - m).exp_()", "kernels/test_slstm.py"),
    Fault("a batch's gradient counts all channels as one", "kernels/batch_norm/plain.py",
          "num = x.numel() // x.shape[1]", "num = x.numel()", "kernels/test_batch_norm.py::test_plain"),
)  # fmt: skip


def main() -> int:
    """Runs them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--only", default="", help="faults of files whose path begins like this")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="faults tried at once")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if fault.file.startswith(options.only)]
    about = sources()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as threads:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(options.at_once):
            copies.put(copy_to(Path(folder) / str(number)))

        def attempt(fault: Fault) -> dict[str, str]:
            copy = copies.get()
            try:
                failed = first_failure(copy, fault)
            finally:
                copies.put(copy)
            print(f"{'caught  ' if failed else 'SURVIVED'} {fault.file}: {fault.fault}", flush=True)
            return {"file": fault.file, "fault": fault.fault, "caught_by": failed}

        named = sorted({path for fault in faults for path in fault.tests.split()})
        broken = [failed for failed in threads.map(lambda tests: failure_of(copies, tests), named) if failed]
        if broken:
            print("These fail without any fault:", *broken, sep="\n  ")
            return 2
        rows = list(threads.map(attempt, faults))
    survived = [row for row in rows if not row["caught_by"]]
    print(f"{len(rows) - len(survived)} of {len(rows)} faults are caught.")
    if options.json is not None:
        record = {"op": "mutations", **about, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if survived else 0


def sources() -> dict[str, Any]:
    """The machine, and which sources are there."""
    import torch

    from torchstorm.bench.record import environment
    from torchstorm.train.stamp import stamp

    rooms = sorted({fault.file.split("/")[0] for fault in FAULTS})
    return {**environment(torch.device("cpu")), **vars(stamp(rooms))}


def copy_to(folder: Path) -> Path:
    """A copy of what the tests need."""
    for name in COPIED:
        source, target = REPOSITORY / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


def failure_of(copies: queue.Queue[Path], tests: str) -> str:
    """The first test that fails as the sources are; "" for none."""
    copy = copies.get()
    try:
        return run(copy, tests)
    finally:
        copies.put(copy)


def first_failure(copy: Path, fault: Fault) -> str:
    """The first test that fails with the fault; "" for none."""
    path = copy / "src" / "torchstorm" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.file} has {text.count(fault.old)} places like this, not one:\n{fault.old}")
    try:
        path.write_text(text.replace(fault.old, fault.new))
        return run(copy, fault.tests)
    finally:
        path.write_text(text)


def run(copy: Path, tests: str) -> str:
    """The first of the tests that fails, as pytest names it; "" for none."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    paths = [f"tests/{path}" for path in tests.split()]
    # No bytecode: that of a file that is written twice within a second might be taken for the other's.
    own = {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *paths], cwd=copy, env=os.environ | own, capture_output=True, text=True, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LONGEST_S} s"
    if done.returncode == 0:
        return ""
    told = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return told[0].split(" - ")[0] if told else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


if __name__ == "__main__":
    sys.exit(main())
