"""What each call of a compiled block asks, in C++ as in Python: whether it has hooks, and how its arguments look."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled.agreement import kinds_of, look_of
from torchstorm.offload.compiled.blocks import hooks_on
from torchstorm.offload.native import library


class Both(NamedTuple):
    first: object
    second: object


class Other:
    """Nothing that anyone knows."""


def tensors() -> st.SearchStrategy[torch.Tensor]:
    made = {
        "plain": lambda: torch.zeros(2, 3),
        "turned": lambda: torch.zeros(2, 3).t(),
        "needs gradients": lambda: torch.zeros(4, requires_grad=True),
        "half": lambda: torch.zeros(1, 1, 5, dtype=torch.bfloat16),
        "number": lambda: torch.tensor(3),
        "empty": lambda: torch.zeros(0, 2),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "parameter": lambda: nn.Parameter(torch.zeros(3)),
        "expanded": lambda: torch.zeros(1, 3).expand(2, 3),
    }
    return st.sampled_from(sorted(made)).map(lambda name: made[name]())


LEAVES = st.one_of(
    tensors(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.builds(Other),
)
KEYS = st.text("ab", max_size=2)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda two: Both(*two)),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def native() -> library.Library:
    found = library.library()
    if found is None:
        pytest.fail("these tests are of the C++")
    return found


@pytest.mark.no_cover
@settings(deadline=None)
@given(VALUES)
def test_arguments_look_the_same_to_cpp(native: library.Library, value: object) -> None:
    by_cpp, by_python = list[int](), list[int]()
    found = native.kinds(value, by_cpp, kinds_of)
    assert found == kinds_of(value, by_python)
    assert hash(found) == hash(kinds_of(value, []))
    assert by_cpp == by_python


def test_arguments_that_hold_themselves_end_as_they_do_in_python(native: library.Library) -> None:
    endless: dict[str, Any] = {}
    endless["again"] = (endless,)
    with pytest.raises(RecursionError):
        native.kinds(endless, [], kinds_of)


@pytest.mark.usefixtures("native")
def test_calls_look_alike_but_for_what_dynamo_may_compile_apart() -> None:
    block, x = nn.Linear(2, 2), torch.zeros(2, 2)
    look = look_of("block", block, ((x,), {"scale": 1.0}))
    assert look == look_of("block", block, ((torch.ones(2, 2),), {"scale": 1.0}))
    longer = look_of("block", block, ((torch.zeros(3, 2),), {"scale": 1.0}))
    assert (longer.kinds, longer.sizes) == (look.kinds, (3, 2, 2, 1))
    for args, kwargs in [
        ((x.double(),), {"scale": 1.0}),
        ((x,), {"scale": 2.0}),
        ((x,), {}),
        ((x, None), {"scale": 1.0}),
    ]:
        assert look_of("block", block, (args, kwargs)) != look


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"inner": nn.Sequential(nn.Tanh(), nn.Linear(2, 2))}))


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("at", [(), (0,), (1, "inner", 1)])
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_hook_is_seen_wherever_it_is_until_it_is_removed(register: str, at: tuple[Any, ...]) -> None:
    block = nested()
    module: Any = block
    for name in at:
        module = module[name]
    assert hooks_on(block) == ()
    first = getattr(module, register)(lambda *_: None)
    seen = hooks_on(block)
    assert seen == private.hook_numbers(block)
    assert len(seen) == 1
    second = getattr(module, register)(lambda *_: None)
    assert hooks_on(block) != seen
    second.remove()
    assert hooks_on(block) == seen
    first.remove()
    assert hooks_on(block) == ()


@pytest.mark.usefixtures("short_way")
def test_modules_that_hold_each_other_are_looked_at_once() -> None:
    block = nn.Sequential(nn.Tanh())
    block[0].outer = block
    assert hooks_on(block) == ()
    block[0].register_forward_hook(lambda *_: None)
    assert len(hooks_on(block)) == 1
