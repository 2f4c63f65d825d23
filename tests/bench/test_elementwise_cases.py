"""The bench's elementwise cases: every way gives the definition's results, and says what it moves."""

from __future__ import annotations

import pytest
import torch

from close import assert_all_close
from torchstorm.bench.elementwise_cases import OPERATIONS, elementwise_cases
from torchstorm.bench.op_cases import OpCase

CPU = torch.device("cpu")


def _results(case: OpCase, way: object, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    own = {name: x.requires_grad_() if name in case.differentiable else x for name, x in inputs.items()}
    y = way({name: x for name, x in own.items() if not name.startswith("d_")})["y"]  # type: ignore[operator]
    grads = torch.autograd.grad(y, [own[name] for name in case.differentiable], own["d_y"])
    return {"y": y.detach(), **dict(zip(case.differentiable, grads, strict=True))}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_way_gives_the_definitions_results(name: str) -> None:
    op, *form = name.split()
    cases = elementwise_cases("small", CPU, torch.float32)
    case = next(each for each in cases if each.op == op and each.shape.endswith(tuple(form) or tuple("0123456789")))
    inputs = dict(case.make(CPU, 3))
    assert all(torch.equal(x, case.make(CPU, 3)[key]) for key, x in inputs.items())
    wide = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    truth, plain = _results(case, case.reference, wide), _results(case, case.reference, dict(case.make(CPU, 3)))
    assert set(case.variants) <= {"torch", "parallel", "auto"}
    scales = {key: float(wide["d_y"].detach().norm()) for key in case.differentiable if key != "x"}
    found = _results(case, lambda given: case.ours(given, "torch"), dict(case.make(CPU, 3)))
    assert_all_close(found, truth, plain, scales=scales, floor=1e-6)


def test_bytes_and_shapes() -> None:
    cases = {(case.op, case.shape): case for case in elementwise_cases("target", torch.device("meta"), torch.bfloat16)}
    num = 512 << 20
    assert cases["gelu", "262144x1024"].work == {"forward": 2 * num, "backward": 3 * num}
    assert cases["add", "262144x1024"].work == {"forward": 2 * num, "backward": num}
    assert ("mul", "4096x65536") in cases
    assert ("batch_norm_act", "64x64x112x112") in cases
