"""The radius within which a prediction cannot change, from the gap of two logits and a certificate's bound."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wellnormed._inputs import require_choice
from wellnormed.certificates import printing
from wellnormed.certificates.sizes import greatest
from wellnormed.proof.arithmetic import FORMATS
from wellnormed.proof.check import change_of
from wellnormed.proof.decimals import float_up, root, rounding_up

if TYPE_CHECKING:
    from wellnormed.certificates.certificate import Certificate

_ROUNDING = 1e-9
"""The share by which a radius is reduced: it exceeds the rounding errors, so that no radius ends in a tie."""


def certified_radius(
    certificate: "Certificate", logits: Tensor, std: float | Sequence[float], dim: int | None
) -> Tensor:
    """See `Certificate.certified_radius`."""
    deviations = np.ravel(std).tolist()
    if not deviations or not all(isinstance(each, float | int) and 0 < each < math.inf for each in deviations):
        raise ValueError(f"certified_radius: std={std} must be positive and finite: what every channel was divided by")
    axis = _axis_of_classes("certified_radius", certificate, dim)
    gap = _gap("certified_radius", certificate, logits, axis)
    if certificate.execution is not None:
        gap = gap * (1 - _ROUNDING) - _changed_by_rounding("certified_radius", certificate, axis)
    return torch.where(gap > 0, gap / _slope_of_a_gap(certificate, axis), 0.0) * (min(deviations) * (1 - _ROUNDING))


def settled(certificate: "Certificate", logits: Tensor, against: str, dim: int | None) -> Tensor:
    """See `Certificate.settled`."""
    require_choice("settled: against", against, ("machines", "real"))
    if certificate.execution is None:
        raise ValueError("settled: the certificate has arithmetic='real', without rounding; certify without it")
    axis = _axis_of_classes("settled", certificate, dim)
    most = _changed_by_rounding("settled", certificate, axis) / (1 if against == "machines" else 2)
    return _gap("settled", certificate, logits, axis) * (1 - _ROUNDING) > most


def unchanged(certificate: "Certificate", logits: Tensor, dim: int | None) -> Tensor:
    """See `Certificate.unchanged`."""
    if certificate.original is None:
        raise ValueError("unchanged: the certificate has no original; pass certify an original=")
    if (change := certificate.change) is None:
        words = printing.of_change(certificate.rows, certificate.execution)
        remedy = "" if certificate.execution is None else "; certify with arithmetic='real' to leave out rounding"
        raise ValueError(f"unchanged: {words}{remedy}")
    axis = _axis_of_classes("unchanged", certificate, dim)
    of_margins = change_of(certificate.rows, certificate.execution, "margin") if axis == -1 else None
    with rounding_up():
        most = float_up(min([root(2) * change.exact, *([] if of_margins is None else [of_margins])]))
    return _gap("unchanged", certificate, logits, axis) * (1 - _ROUNDING) > most


def _axis_of_classes(caller: str, certificate: "Certificate", dim: int | None) -> int:
    """The axis of classes, from the last: two entries of one group differ by at most `sqrt(2)` times its norm."""
    last = certificate.rows[-1]
    count, within = len(last.shape), [axis for axis in last.axes if last.shape[axis] > 1]
    if dim is None and len(within) > 1:
        raise ValueError(
            f"{caller}: the certified result of shape {last.shape} has groups along the axes {last.axes}, and classes "
            "may lie along any of these; pass dim=, such as dim=1 for the channels of images"
        )
    if dim is not None and (not -count <= dim < count or dim % count not in within):
        raise ValueError(
            f"{caller}: dim={dim} is no axis of the groups of the certified result, {within} of {last.shape}; pass one "
            "of these, or certify a model whose classes lie along its last axis"
        )
    return ([*within, count - 1][0] if dim is None else dim % count) - count


def _changed_by_rounding(caller: str, certificate: "Certificate", axis: int) -> float:
    """Most by which two executions change the difference of two logits."""
    if (error := certificate.forward_error) is None:
        raise ValueError(
            f"{caller}: {printing.rounding(certificate)}. For a result in real arithmetic, which no machine executes, "
            "certify with arithmetic='real' and call certified_radius"
        )
    with rounding_up():
        of_margins = [greatest(row, "error") for row in certificate.rows if row.operation == "margin" and axis == -1]
        return float_up(2 * min([root(2) * error.exact, *of_margins]))


def _gap(caller: str, certificate: "Certificate", logits: Tensor, axis: int) -> Tensor:
    """The difference of the two largest logits along an axis, which is counted from the last."""
    classes = certificate.rows[-1].shape[axis]
    if not isinstance(logits, Tensor):
        raise ValueError(f"{caller}: logits must be a tensor, got {type(logits).__name__}; pass the certified result")
    fits = logits.ndim >= -axis and logits.shape[axis] == classes
    if not logits.is_floating_point() or not fits or classes < 2:
        raise ValueError(
            f"{caller}: logits of shape {tuple(logits.shape)} and {logits.dtype} must be floats, of which the "
            f"axis {axis} has the {classes} entries of the certified result, at least 2"
        )
    if torch.finfo(logits.dtype).eps > 2 * _unit_of_the_result(certificate):
        raise ValueError(
            f"{caller}: logits of {logits.dtype} were rounded after the program that the certificate is of; pass what "
            "the program returns, or certify the program that converts it"
        )
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(f"{caller}: logits have entries that are not finite; no prediction follows from them")
    first, second = logits.detach().double().topk(2, dim=axis).values.unbind(axis)
    return first - second


def _unit_of_the_result(certificate: "Certificate") -> float:
    """The largest relative error of one rounding in the dtype of the program's last row that has one."""
    rows = reversed(certificate.rows)
    dtypes = (row.constants.get("dtype") if row.executed is None else row.executed.dtype for row in rows)
    return float(FORMATS[next(filter(None, dtypes))].unit)


def _slope_of_a_gap(certificate: "Certificate", axis: int) -> float:
    """Most by which the difference of two logits changes, over the Euclidean norm of a change of an input's group."""
    with rounding_up():
        slopes = [root(2) * certificate.lipschitz.exact]
        if axis == -1 and (margin := certificate.margin) is not None:
            slopes.append(margin.exact)
        return float_up(min(slopes))
