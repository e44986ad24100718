"""`certified_radius`: how far an input may move before its class can change, from bounds around each input."""

import math

import torch
from torch import Tensor, nn

from wellnormed._devices import default_on_cpu
from wellnormed._inputs import require_module
from wellnormed._warnings import warn
from wellnormed.certificates.around import Around, TooLargeError
from wellnormed.certificates.certificate import Certificate
from wellnormed.certificates.certifying import arguments_of, certify, domain_from
from wellnormed.certificates.continuous import Continuous
from wellnormed.certificates.radius import ROUNDING, slope_of_a_gap
from wellnormed.certificates.zonotope import SHARE, along
from wellnormed.program.comparing import captured
from wellnormed.program.domain import Box, Domain
from wellnormed.program.errors import UncertifiableError
from wellnormed.program.program import Program

STEPS, WITHIN = 12, 1 / 64
"""The search ends after so many bounds, or where the radius is known to this share."""
AT_ONCE = 2**21
"""The entries of the generators of one tensor that are computed together, which a cache holds."""


@default_on_cpu()
def certified_radius(
    model: nn.Module | Program,
    inputs: Tensor,
    labels: Tensor,
    *,
    box: tuple[float, float] | None = None,
    output: str | int | None = None,
) -> Tensor:
    """How far each input may move, in the Euclidean norm, while its label keeps the largest logit.

    The norm is that of `Certificate.certified_radius`: of the whole sample, or of every vector along the last axis if
    there are up to three axes, such as the tokens of a sequence, which may all move so far at once. The radius is the
    larger one of two. The *global* one is the lead of the label over a proved constant, as `certify(..., margins=True)`
    gives it. The *local* one is grown by bounds of the model in a ball around the input. The kernel does not check it:
    it is computed in float64, with a derived allowance for its own rounding errors, and speaks of real arithmetic as
    a certificate does. Where the model has operations without a local bound, or has no constant, the other one serves
    alone, and a warning says so.

    Args:
        model: A classifier in evaluation mode, or a program of one.
        inputs: `(N, *sample)`, floats.
        labels: `(N,)`, integers: the classes of the inputs. Where another logit is as large, the radius is 0.
        box: Two numbers between which all inputs lie, of which alone the radii then speak, as for `certify`.
        output: Which tensor is the logits, if the model returns several.

    Returns:
        Float64, `(N,)`. Infinity if the logits are constant.

    Raises:
        UncertifiableError: The model has neither bound, or mixes the samples of a batch.
        ValueError: Inputs or labels are not as above.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> for layer in (model[0], model[2]):
        ...     _ = nn.init.eye_(layer.weight), nn.init.zeros_(layer.bias)
        >>> x = torch.tensor([[2.0, 1.0], [2.0, -5.0]])
        >>> certified_radius(model, x, torch.tensor([0, 0]))  # at (1.5, 1.5) and (0, -5) are the nearest ties
        tensor([0.7071, 2.0000], dtype=torch.float64)
    """
    if not isinstance(model, Program):
        require_module("certified_radius", model)
    domain = domain_from("certified_radius", 1.0, box) if box else math.inf
    _require(inputs, labels, domain)
    inputs, labels = inputs.detach(), labels.detach().long()
    program = model if isinstance(model, Program) else captured(model, inputs[:1], output)[0]
    if not program.each_sample or len(program.inputs) != 1:
        raise UncertifiableError("certified_radius: the model must take one tensor, and treat every sample alone")
    certificate, why_none = _certificate(program, domain)
    slope, x = math.inf if certificate is None else slope_of_a_gap(certificate), inputs.double()[:, None]
    logits = _logits(program, x)
    classes = logits.shape[-1]
    if logits.ndim != 2 or classes < 2 or not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"certified_radius: labels from {int(labels.min())} to {int(labels.max())} must be classes of the model's "
            f"result for a sample, {tuple(logits.shape[1:])}, which must be a vector of at least 2 logits"
        )
    lead = logits.gather(1, labels[:, None]) - logits.scatter(1, labels[:, None], -math.inf)
    lead = lead.amin(1) - 2 * _ROUNDING_OF_LOGITS * logits.abs().amax(1)
    radii = torch.where(lead > 0, lead / slope * (1 - ROUNDING), 0.0)
    try:
        _Local(Around(program), x, labels).grow(radii)
    except UncertifiableError as error:
        if certificate is None:
            raise UncertifiableError(f"{error}; and it has no constant: {why_none}") from error
        warn(f"certified_radius: {error}; these are the radii of the global constant")
    else:
        if certificate is None:
            warn(f"certified_radius: {why_none}; these are local radii alone")
    return radii


_ROUNDING_OF_LOGITS = 2.0**-40
"""The share by which float64 logits may be wrong where the global constant is divided into their difference."""


def _require(inputs: Tensor, labels: Tensor, domain: Domain) -> None:
    for name, each in (("inputs", inputs), ("labels", labels)):
        if not isinstance(each, Tensor):
            raise ValueError(
                f"certified_radius: {name} must be a tensor, got {type(each).__name__}; pass torch.as_tensor({name})"
            )
    if not inputs.is_floating_point() or inputs.ndim < 2 or not inputs.numel():
        raise ValueError(
            f"certified_radius: inputs must be floats of shape (N, *sample), got {inputs.dtype} and "
            f"{tuple(inputs.shape)}; pass the vectors in the place of tokens"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.shape != inputs.shape[:1]:
        raise ValueError(
            f"certified_radius: labels must be integers of shape ({len(inputs)},), got {labels.dtype} and "
            f"{tuple(labels.shape)}; pass one class for each input"
        )
    if not bool(inputs.isfinite().all()):
        raise ValueError("certified_radius: inputs have entries that are not finite; no prediction follows from them")
    if isinstance(domain, Box) and not domain.low <= float(inputs.min()) <= float(inputs.max()) <= domain.high:
        raise ValueError(
            f"certified_radius: inputs reach from {float(inputs.min())} to {float(inputs.max())}, out of the "
            f"box ({domain.low}, {domain.high}); pass a wider one"
        )


def _certificate(program: Program, domain: Domain) -> tuple[Certificate | None, str]:
    """The certificate, with the margins of all pairs where they can be had, or why there is none."""
    error = ""
    for margins in (True, False):
        try:
            return certify(program, **arguments_of(domain), margins=margins), ""
        except UncertifiableError as refusal:
            error = str(refusal)
    return None, error


def _logits(program: Program, x: Tensor) -> Tensor:
    """The logits in float64, `(N, classes)`; other shapes show that the result is something else."""
    function = Continuous(program)
    (name,) = function.shapes
    found = torch.cat([function.many({name: part}) for part in x.split(256)])
    return found.squeeze(1) if found.ndim == 3 else found


class _Local:
    """Grows radii by bounds around inputs `(N, 1, *sample)`."""

    def __init__(self, around: Around, x: Tensor, labels: Tensor) -> None:
        self._around, self._x, self._labels = around, x, labels

    def grow(self, radii: Tensor) -> None:
        """Raise the radii in place to the largest that the bounds are found to allow."""
        everything = torch.arange(len(radii))
        self._around.result(
            self._x[:1], radii.new_zeros(1)
        )  # refuses what has no bound, and tells how large tensors are
        for part in everything.split(max(1, min(64, AT_ONCE * 2 // (3 * max(1, self._around.peak))))):
            self._grow(part, radii)

    def _grow(self, part: Tensor, radii: Tensor) -> None:
        """By the secant through the last radii on both sides of the largest, a share away from the ends."""
        first = self._allowed(part, torch.zeros(len(part), dtype=torch.float64))
        part, first = part[first > 0], first[first > 0]
        high = torch.minimum(first, 100 * (1 + self._x[part].flatten(1).norm(dim=1)))
        inner, outer = torch.zeros_like(high), torch.full_like(high, math.nan)
        left, right = high, torch.full_like(high, math.nan)  # the allowed radius less the tried one, at both
        for _ in range(STEPS):
            low = radii[part]
            going = high - low > WITHIN * high
            part, high, inner, outer, left, right, low = (
                each[going] for each in (part, high, inner, outer, left, right, low)
            )
            if not len(part):
                return
            secant = inner + (outer - inner) * left / (left - right)
            trial = torch.where(secant.isfinite(), secant, (low + high) / 2)
            trial = torch.minimum(torch.maximum(trial, 0.85 * low + 0.15 * high), 0.15 * low + 0.85 * high)
            trial = torch.where((inner > 0) & (inner + left >= high) & ~secant.isfinite(), high, trial)
            allowed = self._allowed(part, trial)
            radii[part] = torch.maximum(low, torch.minimum(trial, allowed))
            fits, over = allowed >= trial, allowed - trial
            inner, left = torch.where(fits, trial, inner), torch.where(fits, over, left)
            outer, right = torch.where(fits, outer, trial), torch.where(fits, right, over)
            high = torch.minimum(high, torch.where(fits, allowed, trial))

    def _allowed(self, part: Tensor, radius: Tensor) -> Tensor:
        """How far inputs may move by the lines that hold in balls around them; no further than these balls, for them.

        In a ball every lead is at least `lead - noise - reach |change|`. Minus infinity where that says nothing.
        """
        labels = self._labels[part, None]
        try:
            logits = self._around.result(self._x[part], radius)
        except TooLargeError:
            if len(part) == 1:
                return torch.full_like(radius, -math.inf)
            halves = zip(part.tensor_split(2), radius.tensor_split(2), strict=True)
            return torch.cat([self._allowed(*half) for half in halves])
        ball, (centre, generators) = (
            self._around.ball,
            (each.flatten(-2) for each in (logits.centre, logits.generators)),
        )
        lead = centre.gather(1, labels) - centre
        apart = torch.take_along_dim(generators, labels[None], -1) - generators
        error = 2 * (logits.rest + 4 * SHARE * logits.largest)
        safe = lead - ball.noise(apart) - along(error, lead)
        allowed = (safe / ball.reach(apart) * (1 - ROUNDING)).scatter(1, labels, math.inf).amin(1)
        return allowed.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
