"""train/device.py: which device, and errors that say what is there."""

import pytest
import torch

from torchstorm.errors import DeviceError
from torchstorm.train.device import resolve_device


@pytest.fixture
def num_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    return count


def gpus(count: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("num_gpus", [count], indirect=True)


@gpus(0)
def test_without_a_gpu_the_default_is_the_cpu(num_gpus: int) -> None:
    assert resolve_device(None, vram=None) == torch.device("cpu")


@gpus(2)
def test_with_a_gpu_the_default_is_the_first_one(num_gpus: int) -> None:
    assert resolve_device(None, vram="1GiB") == torch.device("cuda", 0)
    assert resolve_device("cuda:1", vram="1GiB") == torch.device("cuda", 1)
    assert resolve_device("cpu", vram=None) == torch.device("cpu")


@gpus(0)
def test_a_vram_budget_without_a_gpu_is_refused_and_points_to_ram_and_disk(num_gpus: int) -> None:
    with pytest.raises(DeviceError, match=r"--vram 2GiB .* finds no CUDA GPU .* --ram and --disk"):
        resolve_device(None, vram="2GiB")


@gpus(1)
def test_a_vram_budget_for_a_run_on_the_cpu_is_refused_though_there_is_a_gpu(num_gpus: int) -> None:
    with pytest.raises(DeviceError, match=r"run is on the CPU \(this machine has 1 CUDA GPU\)"):
        resolve_device("cpu", vram="2GiB")


@gpus(0)
def test_cuda_without_a_gpu_is_refused_with_the_version_of_pytorch(num_gpus: int) -> None:
    with pytest.raises(DeviceError, match=r"--device cuda:0 was given, but PyTorch 2.* finds no CUDA GPU"):
        resolve_device("cuda:0", vram=None)


@gpus(1)
def test_a_gpu_beyond_the_only_one_is_refused_with_their_number(num_gpus: int) -> None:
    with pytest.raises(DeviceError, match=r"--device cuda:3 was given, but this machine has 1 CUDA GPU: use cuda:0\."):
        resolve_device("cuda:3", vram=None)


@gpus(2)
def test_a_gpu_beyond_the_last_is_refused_with_the_range(num_gpus: int) -> None:
    with pytest.raises(DeviceError, match=r"has 2 CUDA GPUs: use cuda:0 to cuda:1\."):
        resolve_device("cuda:2", vram=None)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CPU", ""])
@gpus(1)
def test_a_device_with_an_unknown_name_is_refused_by_that_name(num_gpus: int, name: str) -> None:
    with pytest.raises(DeviceError, match=f"--device '{name}' is not a device"):
        resolve_device(name, vram=None)
