"""Directions: where a step leads, from the momentum of a batch of equal weights.

*The oracle* of a norm is the direction of all published step rules but one. *The sharp operator* scales it by the dual
norm, so that a step is as long as the gradient is large (MD, proposition 1).

*Spectral clipping as the duality map* (Spectral Clipping, section 4): with a gain `k` the singular values of `k m` are
capped at one unit of the norm. It solves `max <k m, d> - |d|_F^2 / 2` over the ball, so directions of little gradient
move little. As `k` grows it tends to `dualize(m)` (section 1.1), and below the cap it is gradient descent of rate `k`.

*NorMuon* (Li et al., 2025, algorithm 1): the oracle's output `o` is divided, neuron by neuron, by the root of a running
average of `o`'s mean squares, and brought back to the Frobenius norm of `o`. As in the authors' code the longer side
counts the neurons, and the squares of each are averaged along the shorter one. It bounds no step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from wellnormed.matrix import spectral_hardcap
from wellnormed.norms import Norm
from wellnormed.parallel import Job


@dataclass(frozen=True)
class Seen:
    """What a direction is told of a batch `(batch, *shape)` of weights that share their shape and their norm.

    `gradient` and `weight` are None unless the direction `sees` them. `state` holds the tensors that it `keeps`, each
    stacked along a new first dimension; it writes their new values there.
    """

    momentum: Tensor
    gradient: Tensor | None
    weight: Tensor | None
    state: dict[str, Tensor]
    norm: Norm
    length: float
    """Learning rate times radius: the norm of a step along a direction of norm 1."""
    step: int
    """How many steps were made before this one."""


class Direction(ABC):
    """From what a step sees of a batch of weights to the direction that is subtracted from them, times the length.

    Directions are compared by equality, and equal ones are computed in one batch.

    Example:
        >>> import wellnormed as wn
        >>> class Cautious(Direction):  # Liang et al., 2024: no entry moves against the gradient
        ...     sees = ("gradient",)
        ...
        ...     def __call__(self, seen):
        ...         step = seen.norm.dualize(seen.momentum)
        ...         return step * (step * seen.gradient > 0)
        >>> layer = torch.nn.Linear(4, 4, bias=False)
        >>> optimizer = wn.Scion(layer, lr=0.1, directions={"weight": Cautious()})
        >>> print(optimizer.update_norm("weight"))
        None
    """

    sees: ClassVar[tuple[Literal["gradient", "weight"], ...]] = ()
    """What it is told beside the momentum; with many processes all of it is sent to the one that computes."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that it keeps for every weight, in the optimizer's state."""

    def acts_on(self, norm: Norm) -> bool:
        """Whether it serves weights of this norm; the others keep the direction of the step rule."""
        return True

    def start(self, name: str, weight: Tensor, norm: Norm) -> Tensor:
        """The first value of a tensor that it `keeps` for one weight: zeros in its shape by default."""
        return torch.zeros_like(weight)

    def bound(self, norm: Norm) -> float | None:
        """The largest norm of a direction. None, the default, for no bound: what needs one then refuses."""
        return None

    @abstractmethod
    def __call__(self, seen: Seen) -> Tensor:
        """The directions of a batch, in the shape of `seen.momentum`."""


class Oracle(Direction):
    """The duality map of the norm."""

    def bound(self, norm: Norm) -> float:
        return norm.overshoot

    def __call__(self, seen: Seen) -> Tensor:
        return seen.norm.dualize(seen.momentum)


class Sharp(Direction):
    """The duality map times the dual norm."""

    def __call__(self, seen: Seen) -> Tensor:
        norm, momentum = seen.norm, seen.momentum
        return norm.dualize(momentum) * norm.dual_norm(momentum)[..., *(None,) * norm.ndim]


@dataclass(frozen=True)
class SpectralClip(Direction):
    """The momentum times `gain`, with singular values capped at one unit of the norm."""

    gain: float

    def bound(self, norm: Norm) -> float:
        return norm.overshoot

    def __call__(self, seen: Seen) -> Tensor:
        return seen.norm.on_slices(self.gain * seen.momentum, spectral_hardcap)


_FLOOR = 1e-8
"""Least mean square of a neuron that NorMuon divides by (the published epsilon)."""


@dataclass(frozen=True)
class NeuronNormalized(Direction):
    """NorMuon: another direction with the squares of its neurons made equal.

    Args:
        kept: The fraction of the average that is kept, the paper's `beta2`.
        inner: The direction whose neurons are normalised.
    """

    kept: float
    inner: Direction
    keeps: ClassVar[tuple[str, ...]] = ("second_moment",)

    def start(self, name: str, weight: Tensor, norm: Norm) -> Tensor:
        """Zeros: one number for every neuron of every slice, in a row."""
        slices = norm.slices(torch.empty(weight.shape, device="meta"))
        return weight.new_zeros(sum(x.numel() // min(x.shape[-2:]) for x in slices))

    def __call__(self, seen: Seen) -> Tensor:
        directions = self.inner(seen)
        batches, averages = seen.norm.slices(directions), []
        parts = seen.state["second_moment"].split([x[0].numel() // min(x.shape[-2:]) for x in batches], -1)
        for i, (slices, part) in enumerate(zip(batches, parts, strict=True)):
            shorter = -1 if slices.shape[-2] >= slices.shape[-1] else -2
            squares = slices.square().mean(shorter, keepdim=True)
            average = part.reshape(squares.shape).lerp(squares, 1 - self.kept)
            divided = slices * average.clamp(min=_FLOOR).rsqrt()
            before, after = (torch.linalg.matrix_norm(x, keepdim=True) for x in (slices, divided))
            batches[i] = divided * (before / after.clamp(min=_FLOOR))
            averages.append(average.flatten(1))
        seen.state["second_moment"] = torch.cat(averages, -1)
        return seen.norm.from_slices(batches, directions)


def job(
    direction: Direction,
    norm: Norm,
    seen: Mapping[str, list[Tensor]],
    states: Mapping[Tensor, Mapping[str, Tensor]],
    length: float,
    step: int,
) -> Job:
    """The directions of a batch, and what is kept of each weight, as work on whole tensors.

    `seen` has a list of momenta, gradients and weights; of the last two only those that are looked at become part of
    the job. The results are the directions and, in the order of `keeps`, the tensors in `states`, brought up to date.
    """

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        told = dict(zip((*direction.sees, "momentum", *direction.keeps), tensors, strict=True))
        state = {key: told[key] for key in direction.keeps}
        own = Seen(told["momentum"], told.get("gradient"), told.get("weight"), state, norm, length, step)
        return direction(own), *(state[key] for key in direction.keeps)

    inputs = [seen[name] for name in (*direction.sees, "momentum")]
    inputs += [[states[parameter][key] for parameter in seen["weight"]] for key in direction.keeps]
    return Job(tuple(inputs), function, read_only=len(direction.sees), cubic=norm.measures == "singular values")
