"""`verify`: derive a certificate again from stored weights, sharing no rule and no torch with `certify`.

It checks that the weights are those of the certificate, that every claim on a weight is true (one float64 Cholesky
factorisation each, with Rump's margin), and that every row follows from its inputs, its constants and its claims. Which
operations the model executes, and with which constants, is the model's code; it takes them from the certificate.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from wellnormed.certificates.bound import rounding_up
from wellnormed.certificates.certificate import ARITHMETIC, NORMS, Certificate, Claim, Row
from wellnormed.certificates.safetensors_file import RawTensor, raw_tensor, read_safetensors
from wellnormed.certificates.verification_rules import CHECKS, Value, derive, require

_DIGITS = 40
"""More than `certify` keeps, so that another order of operations never rounds above what it claims."""


class VerificationError(ValueError):
    """The certificate does not hold for these weights; says which tensor, claim or row failed."""


@dataclass(frozen=True)
class VerificationReport:
    """What `verify` proved."""

    lipschitz: float
    """The bound that now stands, rounded up."""
    tensors: int
    """Tensors whose digests match."""
    claims: int
    """Claims on weights proved again."""
    rows: int
    """Operations derived again."""


def verify(
    certificate: Certificate | str | os.PathLike[str], weights: Mapping[str, Any] | str | os.PathLike[str]
) -> VerificationReport:
    """Prove a certificate again from its weights.

    Args:
        certificate: A certificate or the path of its file.
        weights: Path of a safetensors file, or name -> NumPy array or tensor, as in the model's state dict.

    Raises:
        VerificationError: The file is not intact, a tensor is missing, added or changed, a claim could not be proved,
            or a row promises less than follows.

    Example:
        >>> from torch import nn
        >>> from wellnormed.certificates.walker import certify
        >>> model = nn.Linear(3, 2)
        >>> verify(certify(model), model.state_dict()).claims
        2
    """
    try:
        if not isinstance(certificate, Certificate):
            certificate = Certificate.load(certificate)
        if isinstance(weights, str | os.PathLike):
            tensors = read_safetensors(Path(weights))
        elif not isinstance(weights, Mapping):
            raise VerificationError(f"weights={type(weights).__name__} is no path and no state dict; pass either")
        else:
            tensors = {name: raw_tensor(value) for name, value in weights.items()}
        _check_digests(certificate.tensors, tensors)
        claims = {claim for row in certificate.layers for claim in row.weights}
        for claim in sorted(claims, key=lambda each: (each.tensors, each.measure)):
            _check_claim(claim, tensors)
        _check_rows(certificate)
    except VerificationError:
        raise
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, OSError) as error:
        # Whatever a malformed document trips over is a document that does not verify.
        raise VerificationError(f"not verified: {error or type(error).__name__}") from error
    return VerificationReport(certificate.lipschitz, len(tensors), len(claims), len(certificate.layers))


def _check_digests(expected: Mapping[str, str], tensors: Mapping[str, RawTensor]) -> None:
    for what, names in (("lack", expected.keys() - tensors.keys()), ("add", tensors.keys() - expected.keys())):
        if names:
            raise VerificationError(f"the weights {what} {', '.join(sorted(names))}")
    for name, tensor in tensors.items():
        if tensor.digest != expected[name]:
            raise VerificationError(f"{name} is not the tensor that was certified: its SHA-256 differs")


def _check_claim(claim: Claim, tensors: Mapping[str, RawTensor]) -> None:
    arrays = [tensors[name].array() for name in claim.tensors]
    if claim.measure not in CHECKS:
        raise VerificationError(f"claim on {claim.tensors}: unknown measure {claim.measure!r}")
    if any(array.shape != claim.shape and claim.measure != "product" for array in arrays):
        raise VerificationError(f"claim on {claim.tensors}: shape {claim.shape} is not the tensor's")
    if not all(np.isfinite(array).all() for array in arrays):
        raise VerificationError(f"{claim.tensors} has entries that are not finite")
    if not claim.values or not all(0 <= value < np.inf for value in claim.values):
        raise VerificationError(f"claim on {claim.tensors}: {claim.values} are not norms")
    if not CHECKS[claim.measure](arrays, claim.values):
        raise VerificationError(f"claim on {claim.tensors}: {claim.measure} {claim.values} could not be proved")


def _check_rows(certificate: Certificate) -> None:
    values: dict[str, Value] = {}
    sources = [row for row in certificate.layers if row.rule in ("input", "embedding")]
    if len(sources) != 1 or Decimal(sources[0].constants["radius"]) < Decimal(certificate.input_radius):
        raise VerificationError(f"the certificate must have one input, of radius {certificate.input_radius}")
    if f"RMS <= {certificate.input_radius}" not in certificate.domain:
        raise VerificationError(f"the domain {certificate.domain!r} does not state {certificate.input_radius}")
    if (certificate.norms, certificate.arithmetic) != (NORMS, ARITHMETIC):
        raise VerificationError(f"unknown norms {certificate.norms!r} or arithmetic {certificate.arithmetic!r}")
    for row in certificate.layers:
        if row.name in values:
            raise VerificationError(f"two rows are called {row.name}")
        values[row.name] = _check_row(row, [values[name] for name in row.inputs])


def _check_row(row: Row, inputs: list[Value]) -> Value:
    """Derive a row; claims at least as large are bounds too, and the following rows start from them."""
    with rounding_up(_DIGITS):
        try:
            constants = {key: Decimal(value) for key, value in row.constants.items()}
            require(all(value.is_finite() for value in constants.values()), "constants that are finite")
            derived = derive(row.rule, inputs, constants, row.weights)
        except (LookupError, ValueError, TypeError, ArithmeticError) as error:
            raise VerificationError(f"row {row.name} ({row.rule}) cannot be derived: {error!r}") from error
    for what in ("radius", "lipschitz"):
        stated, needed = getattr(row, what), getattr(derived, what)
        pairs = zip(stated, needed, strict=False)  # of equal length, or the test says so
        if len(stated) != len(needed) or not all(s.is_finite() and s >= n for s, n in pairs):
            raise VerificationError(
                f"row {row.name} ({row.rule}): {what} {stated} is less than {needed}, which follows"
            )
    return Value(row.radius, row.lipschitz, derived.linear, row.name)
