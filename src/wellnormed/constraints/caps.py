"""Caps: constraints without memory that bring a weight back below a norm after every step.

All but the soft cap, which refuses long steps, serve any optimizer. Decays, which hold a norm by
balance with the step, are in `decays`, constraints that hold it at a value in `equalities`.
"""

import copy
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Self

import torch
from torch import Tensor

import wellnormed.matrix as matrix
from wellnormed._devices import recording
from wellnormed._inputs import require_numbers
from wellnormed._ranges import POSITIVE
from wellnormed.constraints.base import SLACK, TARGET, Constraint, State, held, of_each, on_slices
from wellnormed.matrix._checks import known_to_hold
from wellnormed.matrix.sharp_cap import power_for, sharp_cap
from wellnormed.matrix.soft_cap import SOFT_CAP_LIMIT
from wellnormed.norms import Norm
from wellnormed.proof.decimals import shown

UPDATE_ROOM = 0.02
"""The share by which an update may exceed its bound: `msign` states it for 16 bits, and so for float32 products that
torch was allowed to compute with fewer bits; otherwise it is far less."""
_ROUNDING = 2 * SLACK
"""A bound on the rounding that `seen_step` adds, in caps, up to 8e8 entries of float32 and steps as long as the cap."""


@dataclass(frozen=True)
class Cap(Constraint):
    """A constraint without memory that promises `norm(weight) <= cap` after every step.

    Weights are proved to lie at or below the cap before the first step, unless `constrain(..., prove=False)` takes the
    cap's word for it. Later they are where the aim and the accuracy of the matrix functions put them; 16-bit weights
    are constrained in float32 and proved again once they are rounded. Rounding moves every entry by at most the share
    `u`, half the dtype's `eps`, and hardly ever lengthens a weight by more than that share. So their aim is lower by
    `u`, and one proof nearly always succeeds; a weight for which it fails is scaled down and proved again. Caps that
    undo a step shrink all of a weight, and end below the cap without that.

    A cap that leaves a weight within it as it is proves first which weights are (`Norm.within`: one Gram matrix and
    one Cholesky factorization in float64 for each slice of a batch, `2 m n^2 + n^3 / 3` operations). It computes and
    writes only the others. (A sharp cap finds out by a power of the Gram matrix.)

    **A cap need not act after every step.** A step of bound `b` moves a weight of norm `n` to a norm of at most
    `n + b`. A weight that was brought to an aim is therefore at or below the aim plus the bounds of the steps since
    then. While that sum is at most the cap the weight is left as it is, and the first step whose bound leads beyond is
    followed by a projection, before anything sees the weight. The room that a projection leaves is that of `every - 1`
    steps like the one before it, but at most the share `most_room` of the cap: a rate that rises makes projections more
    frequent, a rate that falls makes them rarer. A step without a bound, as AdamW's, is measured: the Frobenius norm of
    what it has added, in the least unit of any part, is its bound. Weights of 16 bits are projected after every step,
    and so are weights that lie over processes after a step without a bound.
    """

    cap: float
    every = 1  # without a type, so that dataclasses which have it as a field say where it stands
    """Steps of one learning rate from one projection to the next."""
    most_room: ClassVar[float] = 0.1
    """The share of the cap that steps may wait for. A tenth costs a small transformer .001 of its loss with hard caps
    and .003 with soft ones, where a half costs .012 and .015 (`docs/results.md`)."""
    undoes_steps: ClassVar[bool] = False
    """Whether the function brings back just so much as the last step may have added, and leaves nothing as it is."""
    looks_first: ClassVar[bool] = False
    """Whether the function leaves a weight within the aim as it is, so that a proof may come before it, by one look."""
    bears_any: ClassVar[str] = "HardCap"
    """A constraint to use in the place of this one where a step is longer than `longest_step`."""
    rounding: ClassVar[float] = 0.0
    """The share by which the aim is lower for weights that are then rounded to 16 bits; `stored_as` sets it."""

    def __post_init__(self) -> None:
        self._require_positive(cap=self.cap)
        require_numbers(f"{type(self).__name__}: ", {"every": self.every}, POSITIVE, "1 is every step", whole=True)

    @property
    def bound(self) -> float:
        return self.cap

    @property
    def longest_step(self) -> float:
        """The norm of the longest step after which the constraint brings a weight back; a longer one is refused."""
        return math.inf

    def stored_as(self, dtype: torch.dtype) -> Self:
        if dtype.itemsize >= 4:
            return self
        own = copy.copy(self)
        vars(own).update(every=1, rounding=0.0 if self.undoes_steps else torch.finfo(dtype).eps / 2)
        return own

    def check(self, norm: Norm, update_norm: float | None, name: str) -> None:
        """Refuse a step that is too long for the function that brings weights back, if that depends on the step."""
        if not self.uses_update_norm:
            return
        step = self._require_update_norm(update_norm, name)
        if not step <= self.longest_step:
            raise ValueError(
                f"{type(self).__name__}({self.cap}) on {name!r}: a step of norm {shown(step, '.4g')} (rate x "
                f"radius x overshoot) is too long for it, which bears {shown(self.longest_step, '.4g', up=False)}; "
                f"lower the learning rate, or use {self.bears_any}, which bears any step"
            )

    def project(self, weights: Tensor, norm: Norm) -> Tensor:
        if not self.tolerance and bool(norm.within(weights, self.cap).all()):
            return weights
        return held(self._start(weights, norm), norm, self.cap)

    def begin(self, weights: Tensor, norm: Norm) -> Tensor:
        # lengths and entries are proved by sums, which cost nothing
        return self._start(weights, norm) if norm.measures == "singular values" else self.project(weights, norm)

    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        return self._after_step(weights, norm, update_norm), {}

    def seen_step(self, update_norm: float | None, weight: Tensor) -> float | None:
        """For a cap that waits or looks first, a bound on the growth of the norm by a step in floating point.

        A step rounds `(1 - decay) W` and the sum with the update, entry by entry. The share `u` of every entry is at
        most the share `u sqrt(r)` of the norm of a slice whose short side is `r`, and `r^2` is at most the number of
        entries. Roundings of the update are within `UPDATE_ROOM`. In 16 bits those of the weight alone may add a fifth
        of its norm at `r = 768`, which leaves nothing to wait for.
        """
        if self.every == 1 and not self.looks_first:
            return super().seen_step(update_norm, weight)
        if update_norm is None:
            return None
        rounding = 2 * (torch.finfo(weight.dtype).eps / 2) * weight.numel() ** 0.25
        return update_norm * (1 + UPDATE_ROOM) + rounding * (self.cap + update_norm)

    def first_reach(self) -> float | None:
        return None if self.every == 1 else float(self.cap)

    def wait(self, reach: float, step: float | None) -> tuple[bool, float]:
        after = reach + (math.inf if step is None else step)
        return (True, after) if after <= self.cap and self.every > 1 else (False, self._aim(step))

    def _aim(self, update_norm: float | None) -> float:
        """The norm that a weight is brought to after a step: the cap, less the room for steps to wait."""
        if update_norm is None or self.every == 1:
            return self.cap
        steps = min(self.every - 1, int(self.cap * self.most_room / update_norm))
        rounding = 2.0**-52 * self.cap  # of each float64 sum, so that exactly so many steps fit
        return self.cap - steps * (update_norm + rounding)

    def _work(self, update_norm: float | None) -> tuple[float, float]:
        """The aim of matrix functions after a step, and how far above it a weight of norm `cap` is by then."""
        level = self._aim(update_norm) * (1 - self.rounding)
        return level * TARGET, (update_norm or 0.0) + (self.cap - level)

    def _start(self, weights: Tensor, norm: Norm) -> Tensor:
        """Bring weights from anywhere to the cap."""
        return norm.project(weights, self._work(None)[0])

    def _after_step(self, weights: Tensor, norm: Norm, update_norm: float | None) -> Tensor:
        """Bring back weights that a step of that norm has moved; slice by slice unless a constraint differs."""
        aim, above = self._work(update_norm)
        return norm.on_slices(weights, lambda slices, unit: self._cap(slices, aim * unit, above * unit))

    def _cap(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        """Bring slices back to the cap; both numbers are largest singular values."""
        raise NotImplementedError

    def __repr__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr and f.name != "every"]
        return f"{type(self).__name__}({', '.join(shown + [f'every={self.every}'] * (self.every > 1))})"


class _LooksFirst(Cap):
    """Caps that leave a weight within the aim as it is, by a proof, and act on weights with other caps in one batch."""

    looks_first: ClassVar[bool] = True
    _method: ClassVar[str] = "auto"
    """The method of the matrix function, chosen by the device. Scripts that measure the other methods override it."""
    _function: ClassVar[Callable[..., Tensor]]
    """The matrix function: of slices and their caps."""

    def alike(self, update_norm: float | None) -> Hashable:
        return type(self), self.rounding, update_norm is None

    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        count = len(weights)
        return self.apply_each([self] * count, weights, norm, [update_norm] * count, state)

    @classmethod
    def apply_each(
        cls, constraints: Sequence[Self], weights: Tensor, norm: Norm, steps: Sequence[float | None], state: State
    ) -> tuple[Tensor, State]:
        outside = list(range(len(weights)))
        # weights of 16 bits are looked at twice already
        if not recording(weights.device) and not (steps[0] is None and constraints[0].rounding > 0):
            aims = of_each([each._aim(step) for each, step in zip(constraints, steps, strict=True)], weights.device)
            with known_to_hold():  # what is not finite is not proved, and the projection refuses it
                is_outside = (~norm.within(weights, aims)).tolist()
            outside = [i for i in outside if is_outside[i]]
        if len(outside) == len(weights):
            return cls._projected(constraints, weights, norm, steps), {}
        if outside:
            members = list(weights)
            stacked = torch.stack([members[i] for i in outside])
            moved = cls._projected([constraints[i] for i in outside], stacked, norm, [steps[i] for i in outside])
            for i, member in zip(outside, moved, strict=True):
                members[i] = member
            weights = torch.stack(members)
        return weights, {}

    @classmethod
    def _projected(
        cls, constraints: Sequence[Self], weights: Tensor, norm: Norm, steps: Sequence[float | None]
    ) -> Tensor:
        aims = [each._work(step)[0] for each, step in zip(constraints, steps, strict=True)]
        known = {} if recording(weights.device) else cls._known(constraints, aims, steps)  # a replay has other rates
        project, caps = functools.partial(cls._function, method=cls._method, **known), of_each(aims, weights.device)
        return norm.on_slices(weights, lambda slices, unit: project(slices, on_slices(caps, slices) * unit))

    @classmethod
    def _known(cls, constraints: Sequence[Self], aims: list[float], steps: Sequence[float | None]) -> dict[str, float]:
        """What the matrix function may know of weights after steps of these bounds."""
        return {}


@functools.lru_cache(maxsize=1024)
def _short_side(norm: Norm, shape: torch.Size) -> int:
    """The shorter side of the largest slice of a weight."""
    return max(min(x.shape[-2:]) for x in norm.slices(torch.empty(shape, device="meta")))


@dataclass(frozen=True, repr=False)
class HardCap(_LooksFirst):
    """Singular values above the cap become the cap; the others stay (Spectral Clipping, section 3).

    With `every=8` it acts after about every eighth step and then leaves room for seven more: the cap still holds after
    every step, and costs an eighth; `Cap` has the proof. Where it is computed by matrix products
    alone, as on GPUs, singular values above the aim may then end up to a quarter of the room below it, which takes less
    than half of the products. On a CPU, slices with a side below 128 take a soft cap of a high power
    (`matrix.sharp_cap`), a tenth of the time: values above the aim end up to 5.1% below it, 9.1% where steps are a
    tenth of the cap; of values below the aim, the usual power 16 takes 2.2% next to it, .4% at 0.9 aims, .06% at 0.8.

    Args:
        cap: The cap, in units of the weight's norm. Weights above it are brought below it at once.
        every: Steps of one learning rate from one projection to the next. With 1, the default, no room is left.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(8, 8, bias=False)
        >>> optimizer = wn.Scion(layer, lr=0.02)
        >>> constraints = wn.constrain(optimizer, {"weight": HardCap(1.0, every=8)})
        >>> for _ in range(20):
        ...     layer.weight.grad = -layer.weight.detach().clone()
        ...     optimizer.step()
        ...     assert constraints.proved_ratios()["weight"] <= 1
    """

    every: int = 1  # pyrefly: ignore[bad-override]
    _function = staticmethod(matrix.spectral_hardcap)

    @classmethod
    def apply_each(
        cls, constraints: Sequence[Self], weights: Tensor, norm: Norm, steps: Sequence[float | None], state: State
    ) -> tuple[Tensor, State]:
        aims = [c._work(step)[0] for c, step in zip(constraints, steps, strict=True)]
        known = cls._known(constraints, aims, steps)
        waits = cls._method == "auto" and weights.device.type == "cpu" and known.get("blur", 0.0) > 0
        if not (waits and (power := power_for(_short_side(norm, weights.shape[1:]), known["most"]))):
            return super().apply_each(constraints, weights, norm, steps, state)
        caps = of_each(aims, weights.device)
        return norm.on_slices(weights, lambda x, unit: sharp_cap(x, on_slices(caps, x) * unit, power)), {}

    @classmethod
    def _known(cls, constraints: Sequence[Self], aims: list[float], steps: Sequence[float | None]) -> dict[str, float]:
        if None in steps:
            return {}
        each = [(c.cap, c._aim(step), c.cap + (step or 0.0)) for c, step in zip(constraints, steps, strict=True)]
        most = max(after / aim for (_, _, after), aim in zip(each, aims, strict=True))
        # a quarter of the room at most, for two fifths of the products
        return {"most": most, "blur": min((cap - level) / (4 * level) for cap, level, _ in each)}


@dataclass(frozen=True, repr=False)
class SpectralNormalize(_LooksFirst):
    """A weight above the cap is divided by a bound on its norm, so that it really ends below (LT section 3.1).

    Args:
        cap: The cap, in units of the weight's norm. Weights above it are brought below it at once.
        every: Steps of one learning rate from one projection to the next, as in `HardCap`.
    """

    every: int = 1  # pyrefly: ignore[bad-override]
    _function = staticmethod(matrix.spectral_normalize)


@dataclass(frozen=True, repr=False)
class SoftCap(Cap):
    """LT's soft cap, `p2(p1(W))`, coupled to the true norm of the step (LT theorem B.1, corrected).

    The strength comes from learning rate x overshoot of the coefficient set, less what a weight decay of the optimizer
    removes from the cap. It holds the promise for steps up to 1.6129 times the cap, and refuses longer ones. Where it
    waits it is asked to undo at most a ninth of what it aims at, and the last step.

    Args:
        cap: The cap, in units of the weight's norm.
        every: Steps of one learning rate from one application to the next, as in `HardCap`. One after eight steps
            undoes all eight, and takes about as much of what is below the cap as eight would. No decay is credited.
    """

    uses_update_norm: ClassVar[bool] = True
    undoes_steps: ClassVar[bool] = True

    every: int = 1  # pyrefly: ignore[bad-override]

    @property
    def longest_step(self) -> float:
        longest = ((SOFT_CAP_LIMIT - 1 - SLACK) * TARGET - 1e-9) * self.cap  # what `_work` and `_cap` make of a step
        return longest if self.every == 1 else (longest - _ROUNDING * self.cap) / (1 + UPDATE_ROOM)

    def _cap(self, slices: Tensor, cap: float, update_norm: float) -> Tensor:
        return matrix.soft_cap(slices, matrix.soft_cap_strength(cap, update_norm + SLACK * cap))


@dataclass(frozen=True)
class SpectralInterval(Cap):
    """Singular values move to the nearest point of `[lower, upper]`; those that are zero stay (Spectral Clipping).

    Promises `norm(weight) <= upper`. The other singular values end at `lower` or above within rounding; a weight of
    zero stays zero.

    Args:
        lower: Least singular value, in units of the weight's norm; at least 0.
        upper: The cap, in the same units. Weights are clipped at once.
    """

    tolerance: ClassVar[float] = 1e-4  # float32

    cap: float = field(init=False, repr=False, compare=False)
    lower: float
    upper: float

    def __post_init__(self) -> None:
        self._require_positive(upper=self.upper)
        require_numbers("SpectralInterval: ", {"lower": self.lower})
        object.__setattr__(self, "cap", self.upper)
        if not 0 <= self.lower <= self.upper:
            raise ValueError(
                f"SpectralInterval: lower={self.lower} must lie in [0, upper={self.upper}]; HardCap has no lower end"
            )

    def _start(self, weights: Tensor, norm: Norm) -> Tensor:
        return self._after_step(weights, norm, None)

    def _after_step(self, weights: Tensor, norm: Norm, update_norm: float | None) -> Tensor:
        upper, _ = self._work(None)
        lower = min(self.lower, upper)
        return norm.on_slices(weights, lambda slices, unit: matrix.spectral_clip(slices, lower * unit, upper * unit))


class _OfParts(Cap):
    """Caps of lengths or entries."""

    def _after_step(self, weights: Tensor, norm: Norm, update_norm: float | None) -> Tensor:
        return norm.project(weights, self._work(update_norm)[0])


@dataclass(frozen=True, repr=False)
class ColumnCap(_OfParts):
    """Columns (or embedding vectors) of RMS above the cap are scaled back to it (LT section 4.4).

    So are rows and biases, where the norm is theirs: `RowNorm`, `BiasRMS`, `Euclidean`.

    Args:
        cap: The cap, in units of the weight's norm.
        every: Steps of one learning rate from one projection to the next, as in `HardCap`.
    """

    serves: ClassVar[tuple[str, ...]] = ("lengths",)
    every: int = 1  # pyrefly: ignore[bad-override]


@dataclass(frozen=True, repr=False)
class EntryCap(_OfParts):
    """Entries whose absolute value exceeds the cap become the cap: the projection in the norms `Sign` and `Gain`.

    Args:
        cap: The cap, in units of the weight's norm.
        every: Steps of one learning rate from one projection to the next, as in `HardCap`.
    """

    serves: ClassVar[tuple[str, ...]] = ("entries",)
    every: int = 1  # pyrefly: ignore[bad-override]
