"""Compiled models of 18 families of transformers: whatever variants a budget's plan picks, the bits are the same.

`make test-families` runs all cases and writes one record; three of them run everywhere, one with dropout.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch

from offload.steps import Outcome, assert_same
from torchstorm.bench.record import environment
from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled.compile import CompiledBlocks
from torchstorm.offload.session import Session
from torchstorm.plan.variants import VARIANTS
from torchstorm.train.stamp import TRAINING, stamp

transformers = pytest.importorskip("transformers")

from offload.families import FAMILIES  # noqa: E402  (it imports transformers)

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu" / "families.json"
SHARES = (0.75, 0.65, 0.55)  # of what is saved where everything is kept
EVERYWHERE = (("GPT-2", True), ("ViT", False), ("Mamba-2", False))  # and whether with dropout
NUM_STEPS = 4
ENOUGH = 15  # families in which the smallest variant must have the same bits

pytestmark = [
    pytest.mark.usefixtures("told_once"),
    pytest.mark.no_cover,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Case = tuple[str, float, bool]


@pytest.fixture(autouse=True)
def _one_compilation_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets share what Inductor has compiled of a graph, also of the variant that tells what the others would save.
    Each is captured and partitioned anew."""
    compile_with = private.compile_with

    def with_cache(function: Callable[..., Any], partitioner: Any, *, cache: bool) -> Callable[..., Any]:
        compiled = compile_with(function, partitioner, cache=True)
        if cache:
            return compiled

        def call(*args: Any) -> Any:
            with functorch.patch(enable_autograd_cache=False):  # which would not ask for the partition
                return compiled(*args)

        return call

    monkeypatch.setattr(private, "compile_with", with_cache)


def cases(names: Any) -> list[Case]:
    """A family's cases one after the other, so that they share what Inductor has compiled."""
    return [(name, share, dropout) for name in names for dropout in (False, True) for share in SHARES]


@pytest.fixture(scope="module")
def rows() -> Iterator[list[dict[str, Any]]]:
    """What is recorded: written where all cases have run."""
    found: list[dict[str, Any]] = []
    code = stamp(TRAINING)
    yield found
    if len(found) == len(cases(FAMILIES)):
        record = {"op": "families", **environment(torch.device("cpu")), **vars(code)}
        RECORD.write_text(json.dumps({**record, "rows": found}, indent=1) + "\n")


def smallest(blocks: CompiledBlocks) -> dict[str, str]:
    """For every block the variant that saves the fewest bytes, those that were dropped among them."""
    found = {}
    for name, kind in blocks._kinds.items():
        known = kind.merged()
        found[name] = min(known, key=lambda variant: (known[variant].saved_bytes, VARIANTS.index(variant)))
    return found


def train(family: str, session: Session, model: torch.nn.Module) -> Outcome:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outcome = Outcome()
    blocks = session.compile()
    for index in range(NUM_STEPS):
        torch.manual_seed(100 + index)
        with session.step():
            loss = FAMILIES[family].step(model)
        if index == NUM_STEPS - 2 and not blocks.fixed:
            # A mix that no plan need have picked: the smallest one in every other block.
            blocks.adopt(dict(list(smallest(blocks).items())[::2]))
        outcome.losses.append(loss.detach().clone())
        outcome.gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        )
        optimizer.step()
        optimizer.zero_grad()
    outcome.state = {name: value.clone() for name, value in model.state_dict().items()}
    return outcome


def make(family: str, dropout: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    return FAMILIES[family].make(dropout=dropout)


@functools.cache
def kept(family: str, dropout: bool) -> tuple[Outcome, int]:
    """The same training with everything kept, and the bytes saved then."""
    model = make(family, dropout)
    with Session(model, unlimited=True) as session:
        outcome = train(family, session, model)
        return outcome, session.usage().ram_bytes


def check(case: Case, spill: Path, rows: list[dict[str, Any]]) -> None:
    family, share, dropout = case
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.compiler.reset()
    expected, needed = kept(family, dropout)
    model = make(family, dropout)
    budget = int(needed * share)
    with Session(model, ram=budget, disk=str(spill)) as session:
        found = train(family, session, model)
        report, blocks = session.report(), session._shared.compiled
    assert_same(expected, found)
    assert report.highest is not None
    assert blocks is not None
    assert blocks.choice is not None, "a plan picked variants"
    survived = all(variant not in blocks._kinds[name].agreement.dropped for name, variant in smallest(blocks).items())
    rows.append(
        {
            "family": family,
            "dropout": dropout and bool(FAMILIES[family].dropout),
            "share": share,
            "budget_bytes": budget,
            "highest_bytes": report.highest.ram_bytes,
            "picked": blocks.choice.variants,
            "then": dict(blocks.variants),
            "smallest_survived": survived,
            "notes": [note for note in blocks.notes if "not used" in note],
        }
    )
    print(json.dumps(rows[-1]))  # a run of some cases writes no record: `pytest -rP` shows it


@pytest.mark.parametrize(("family", "dropout"), EVERYWHERE)
def test_a_familys_bits_are_those_of_everything_kept(family: str, dropout: bool, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for share in SHARES:  # in one test: they share what is compiled, which other processes would not
        check((family, share, dropout), tmp_path, rows)
    assert all(row["smallest_survived"] for row in rows), rows[0]["notes"]


@pytest.mark.families
@pytest.mark.parametrize("case", cases(FAMILIES), ids=str)
def test_every_familys_bits_are_those_of_everything_kept(
    case: Case, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    check(case, tmp_path, rows)


@pytest.mark.families
def test_the_smallest_variant_survives_in_nearly_all_families(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == len(cases(FAMILIES)) == 108, "this test comes after all cases, in one process"
    lost = {row["family"] for row in rows if not row["smallest_survived"]}
    assert len(FAMILIES) - len(lost) >= ENOUGH, f"lost in {sorted(lost)}"
