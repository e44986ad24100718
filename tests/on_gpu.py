"""A plugin, `pytest -p tests.on_gpu`: tensors and layers that a test makes lie on a CUDA device, with the same numbers.

What the package makes itself stays where its code puts it, so that a tensor on the wrong device is found. Numbers are
drawn on the CPU and moved. `WELLNORMED_TEST_DEVICE` names another device than "cuda".

Tests fail with it by themselves where they compare with tensors on the CPU, convert to NumPy, or are about what is done
on a CPU alone; each failure has to be read.
"""

import os
import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

DEVICE = torch.device(os.environ.get("WELLNORMED_TEST_DEVICE", "cuda"))
TESTS = str(Path(__file__).parent)
LAYERS = tuple(str(Path(__file__).parents[1] / "src" / "wellnormed" / room) for room in ("nn", "models"))
TORCH = str(Path(torch.__file__).parent)
DRAWS = {
    getattr(torch.Tensor, name)
    for name in ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "geometric_", "cauchy_")
}


def by_a_test() -> bool:
    """Whether a test makes this tensor, itself or by the constructor of a layer."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        built = frame.f_code.co_name == "__init__" and file.startswith(LAYERS)
        if not (file.startswith((TORCH, "<")) or file == __file__ or built):
            return file.startswith(TESTS)
        frame = frame.f_back
    return False


class OnDevice(TorchFunctionMode):
    """Moves what a test makes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _device_constructors() and kwargs.get("device") is None and by_a_test():
            needs = kwargs.pop("requires_grad", False)
            value = func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
            return value.requires_grad_() if needs else value
        if func in DRAWS and args[0].device.type == DEVICE.type != "cpu":
            drawn = func(torch.empty_like(args[0], device="cpu"), *args[1:], **kwargs)
            with torch.no_grad():
                return args[0].copy_(drawn)
        return func(*args, **kwargs)


def pytest_configure() -> None:
    """Called for a plugin, and not where the file is only imported."""
    strict = torch.testing.assert_close
    torch.testing.assert_close = lambda *given, **more: strict(*given, **{"check_device": False, **more})
    OnDevice().__enter__()
