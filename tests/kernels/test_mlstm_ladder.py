"""The ladder: every rung is told, has a reference that is what it says, and refuses what does not fit.

What the kernels compute is tested in test_mlstm_quadratic.py, and on a GPU in test_mlstm_quadratic_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels import mlstm, mlstm_ladder, variants
from torchstorm.kernels.mlstm import ladder
from torchstorm.kernels.mlstm.reference import mlstm_recurrent

Q, V, GATE = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5)


def test_every_rung_has_its_lesson_and_cost() -> None:
    rungs = mlstm_ladder()
    assert [rung.name for rung in rungs[:4]] == ["matmul_tiles", "qk_v", "causal", "gated"]
    assert [rung.name for rung in rungs[4:]] == [name for name in variants("mlstm") if name.startswith("triton")]
    assert [rung.has_backward for rung in rungs] == [False] * 4 + [True] * 3
    for rung in rungs:
        assert len(rung.lesson) > 20, rung.name
        assert len(rung.costs) > 10, rung.name


def test_the_references_are_what_they_say() -> None:
    k, i, f = torch.randn_like(Q), torch.randn_like(GATE), torch.randn_like(GATE)
    named = {"q": Q, "k": k, "k_t": k.mT, "v": V, "i": i, "f": f}
    product, pairs, earlier, gated, *whole = (
        rung.reference(*(named[name] for name in rung.inputs)) for rung in mlstm_ladder()
    )
    assert torch.equal(product, Q @ k.mT)
    scores = product / 2
    torch.testing.assert_close(pairs, scores @ V)
    torch.testing.assert_close(earlier[:, :, 1], scores[:, :, 1, :2, None].mul(V[:, :, :2]).sum(2))
    for h in (gated, *whole):
        torch.testing.assert_close(h, mlstm_recurrent(Q, k, V, i, f)[0])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ladder.matmul_tiles(Q, Q), ShapeError, r"b must be \(1, 2, 4, 'N'\)"),
        (lambda: ladder.matmul_tiles(Q, Q.mT), DeviceError, "on one GPU"),
        (lambda: ladder.qk_v(Q, Q, V[:, :, 1:]), ShapeError, r"v \(1, 2, 4, 3\)"),
        (lambda: ladder.causal(Q, Q, V.double()), ShapeError, "float64"),
        (lambda: ladder.gated(Q, Q, V, GATE, GATE[..., 1:]), ShapeError, r"f \(1, 2, 4\)"),
        (lambda: mlstm(Q, Q, V, GATE, GATE, variant="triton-quadratic"), DeviceError, "runs on a GPU"),
        (lambda: mlstm(Q, Q, V, GATE, GATE, variant="quadratic", chunk=64), ConfigError, "has no chunks"),
    ],
)
def test_what_does_not_fit_is_reported(call: Callable[[], Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
