"""Gradients that are not finite: refused before the step, or skipped by it where a look at them would wait.

A CPU is asked at once. Another device would first have to do all that it was told, so that it is asked nothing: it
finds out by itself whether a gradient is not finite, in which case its step moves nothing, and says so a step later.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellnormed.parallel import Placement
from wellnormed.parallel.layout import is_distributed, local


class NonFiniteGradientError(ValueError):
    """A gradient holds NaN or infinity; nothing was changed."""


class Answer(NamedTuple):
    """What a device has found of one step, on its way to the CPU."""

    names: list[str]
    largest: Tensor
    arrived: Any
    """The event that says so; None where nothing is on its way."""
    step: int


class GradientCheck:
    """Refuses a step whose gradients are not finite, now or after it was skipped."""

    def __init__(self) -> None:
        self._answer: Answer | None = None

    def before_step(
        self, gradients: Mapping[str, Tensor], among: list[str], placement: Placement, step: int
    ) -> Tensor | None:
        """Refuse these gradients in every process, or return the device's own answer: whether they are not finite.

        With an answer, which has no dimensions, gradients that are not finite have become zero, and the step is to
        change nothing. `among` are all parameters, the same in every process.
        """
        devices = {gradient.device for gradient in gradients.values()}
        alone = not placement.shared and not any(map(is_distributed, gradients.values()))
        if alone and len(devices) == 1 and (device := devices.pop()).type != "cpu":
            return self._skipping(gradients, device, step)
        sizes = placement.agree(_sizes(gradients), among)
        _refuse([name for name, size in sizes.items() if not size < math.inf], step)
        return None

    def require_last(self) -> None:
        """Refuse what the last step has skipped."""
        answer, self._answer = self._answer, None
        if answer is not None:
            if answer.arrived is not None:
                answer.arrived.synchronize()
            largest = zip(answer.names, answer.largest.tolist(), strict=True)
            _refuse([name for name, size in largest if not size < math.inf], answer.step)

    def _skipping(self, gradients: Mapping[str, Tensor], device: torch.device, step: int) -> Tensor:
        parts = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
        largest = torch.stack(torch._foreach_norm(list(parts.values()), math.inf))
        spoilt = ~largest.isfinite().all()
        for part in parts.values():
            part.masked_fill_(spoilt, 0.0)
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            there = largest.to("cpu", non_blocking=True)
            arrived = torch.get_device_module(device).current_stream().record_event() if device.type == "cuda" else None
            self._answer = Answer(list(parts), there, arrived, step)
        return spoilt


def _sizes(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """A number for every gradient, not finite where an entry is not."""
    parts = {name: part for name, gradient in gradients.items() if (part := local(gradient)).numel()}
    sizes = dict.fromkeys(gradients, 0.0)
    for device in {part.device for part in parts.values()}:
        here = [name for name, part in parts.items() if part.device == device]
        norms = torch._foreach_norm([parts[name] for name in here])
        for name, length in zip(here, torch.stack([x.double() for x in norms]).tolist(), strict=True):  # one transfer
            # squares above 1e19 leave the range of float32; largest entries do not, but take 30 times as long on a CPU
            sizes[name] = (
                length if length < math.inf else float(parts[name].double().abs().amax().nan_to_num(math.inf, math.inf))
            )
    return sizes


def _refuse(bad: list[str], step: int) -> None:
    if bad:
        others = f" and {len(bad) - 5} others" if len(bad) > 5 else ""
        raise NonFiniteGradientError(
            f"the gradient of {', '.join(bad[:5])}{others} holds NaN or infinity at step {step}; nothing was changed. "
            "Lower the learning rate, or find the operation with torch.autograd.set_detect_anomaly(True)"
        )
