"""`verify` proves a stored certificate again; `require_same_model` compares a certificate with a model's code."""

import os
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellnormed._devices import default_on_cpu
from wellnormed.certificates.arguments import settings_of
from wellnormed.certificates.certificate import Certificate
from wellnormed.certificates.certifying import certify
from wellnormed.constraints import Constraints
from wellnormed.lowering.networks import Joint
from wellnormed.lowering.stored import raw_tensor
from wellnormed.program.program import Program
from wellnormed.proof import Bounds, CheckError, Report, check
from wellnormed.proof.files import Stored, read_safetensors
from wellnormed.proof.reading import word
from wellnormed.routing.patterns import bare_names

_ROUNDED = Decimal("1e-4")
"""The largest relative difference of the same bound in a stored and in a fresh certificate. Tensors that the model
computes, such as sines of large angles, agree in three quarters of their digits between machines."""


@default_on_cpu()
def verify(
    certificate: Certificate | str | os.PathLike[str],
    weights: Mapping[str, Any] | str | os.PathLike[str],
    original: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Report:
    """Prove a certificate again from its weights.

    The proof shows that the stated bound follows, with these tensors, from the operations that the certificate lists.
    It does not show that a model executes these operations; `require_same_model` compares them with the model's code.

    Args:
        certificate: A certificate, or the path of its file.
        weights: Path of a safetensors file, or name -> tensor or NumPy array, as in the model's state dict. The
            prefixes that `torch.compile` and other wrappers add to names are ignored, and a tensor that is missing may
            have another name, as tied weights do in the files of `transformers`: its digest is then the certified one.
            With an empty dictionary, a certificate within caps is proved for all weights that keep these.
        original: The same of the original model, for a certificate that `certify(original=...)` made. A tensor that it
            shares with the model may be left out, and is refused if it differs.

    Raises:
        CheckError: The file is not intact, a tensor is missing or changed, a claim could not be proved, or a row
            states a smaller bound than the one that follows.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> verify(certify(model, torch.zeros(1, 3)), model.state_dict()).claims
        2
    """
    try:
        if not isinstance(certificate, Certificate):
            certificate = Certificate.load(certificate)
    except (ValueError, OSError, TypeError) as error:
        raise CheckError(f"not proved: {error}") from error
    replaced = set((certificate.original or {}).values())
    if (original is None) != (certificate.original is None):
        words = "has no original; leave out original=", "has an original; pass its weights as original="
        raise CheckError(f"the certificate {words[original is None]}")
    certified = [*(certificate.tensors.keys() - replaced), *(each.name for each in certificate.promises)]
    tensors = _read(weights, certified)
    for each in certificate.promises:  # of which the kernel has no digest: it proves whatever weights are within caps
        if tensors and each.name not in tensors:
            raise CheckError(
                f"there is no stored tensor {each.name!r}, of which a cap is promised; pass model.state_dict()"
            )
    if original is not None:
        theirs = _read(original, [name for name in certificate.tensors if name not in replaced])
        tensors |= {f"original/{name}": tensor for name, tensor in theirs.items()}
    computed = {name: _stored(name, tensor) for name, tensor in certificate.computed.items()}
    return check(certificate.document(), tensors | computed)


def _read(weights: Mapping[str, Any] | str | os.PathLike[str], certified: Sequence[str]) -> dict[str, Stored]:
    """The tensors of these names in a file or a state dict."""
    if isinstance(weights, str | os.PathLike):
        return _renamed(read_safetensors(Path(weights)), certified)
    if not isinstance(weights, Mapping):
        raise CheckError(f"weights must be a path or state dict, got {type(weights).__name__}; pass model.state_dict()")
    named = _renamed({str(name): value for name, value in weights.items()}, certified)
    needed = certified if named.keys() >= {*certified} else named  # a missing tensor may have another name
    return {name: _stored(name, named[name]) for name in needed}


def require_same_model(
    certificate: Certificate,
    model: nn.Module | Program,
    example_input: Any = None,
    *,
    output: str | int | None = None,
    within: Constraints | None = None,
    original: nn.Module | Program | None = None,
) -> None:
    """Refuse a model, or a program, whose operations or tensors differ from those that a certificate lists.

    `verify` proves a stored bound from the listed operations; this function checks that a model executes these
    operations. It certifies the model again, and compares both certificates. Operations must be the same. Stored
    tensors, such as weights, must have the same bits, except for those whose caps the proof uses instead of their
    entries. Tensors that the model computes are compared within rounding, which differs between machines; the
    certificate holds for those in its file. The bounds of a row may differ only as much as such rounding explains.

    Args:
        certificate: The certificate to compare with.
        model: As for `certify`.
        example_input: As for `certify`, with the certificate's shape and with the same values of its fixed inputs.
        output: As for `certify`.
        within: As for `certify`, if the certificate was made with it.
        original: As for `certify`, if the certificate was made with it.

    Raises:
        CheckError: Names the first difference.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> certificate = certify(model, torch.zeros(1, 3))
        >>> require_same_model(certificate, model, torch.zeros(1, 3))
        >>> require_same_model(certificate, nn.Linear(3, 2), torch.zeros(1, 3))
        Traceback (most recent call last):
        ...
        wellnormed.proof.reading.CheckError: bias is another tensor in the model than in the certificate
    """
    margins = any(row.operation == "margin" for row in certificate.rows)
    domain = settings_of(certificate.input_domain)
    joint = Joint(certificate.rows, certificate.computed)
    effort = joint if any(row.operation == "lipsdp" for row in certificate.rows) else "standard"
    fresh = certify(
        model, example_input, **domain, output=output, margins=margins, within=within, effort=effort,
        arithmetic=certificate.execution or "real", original=original,
    )  # fmt: skip
    _require_equal("number of operations", len(fresh.rows), len(certificate.rows))
    for ours, theirs in zip(fresh.rows, certificate.rows, strict=True):
        for what in ("name", "operation", "inputs", "shape", "constants", "reads", "axes"):
            _require_equal(f"{what} of operation {ours.name!r}", getattr(ours, what), getattr(theirs, what))
        used = ([(c.measure, c.tensors, c.constants) for c in row.claims] for row in (ours, theirs))
        _require_equal(f"claims of operation {ours.name!r}", *used)
    for name in sorted(fresh.tensors.keys() | certificate.tensors.keys()):
        if fresh.tensors.get(name) != certificate.tensors.get(name):
            raise CheckError(f"{name} is another tensor in the model than in the certificate")
    for ours, theirs in zip(fresh.rows, certificate.rows, strict=True):
        if ours.bounds is not None and theirs.bounds is not None:
            for what, a, b in zip(Bounds._fields, ours.bounds, theirs.bounds, strict=True):
                if a.shape != b.shape or bool((abs(a - b) > _ROUNDED * a).any()):
                    raise CheckError(f"operation {ours.name!r} has another {what} in the model than in the certificate")
    if fresh.promises != certificate.promises:
        ours, theirs = ("; ".join(map(str, each.promises)) or "none" for each in (fresh, certificate))
        raise CheckError(
            f"the promises of the model are {ours}, of the certificate {theirs}; pass as within= the constraints that "
            "the certificate was made with"
        )
    _require_equal("inputs that the example fixes", fresh.fixed, certificate.fixed)
    for name, tensor in fresh.computed.items():
        if name not in certificate.computed or not close(tensor, certificate.computed[name]):
            what = "which the example fixes" if name in fresh.fixed else "which the model computes"
            raise CheckError(f"{name}, {what}, is another tensor than in the certificate")
    _require_equal("use of single samples of a batch", fresh.each_sample, certificate.each_sample)


def _require_equal(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise CheckError(f"the model and the certificate differ in the {what}: {ours!r} and {theirs!r}")


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and dtype, and entries that differ by no more than rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    # sines of large angles agree only in three quarters of the digits of the largest entry
    tolerance = torch.finfo(a.dtype).eps ** 0.75 * float(b.abs().max())
    return bool(((a.double() - b.double()).abs() <= tolerance).all())


def _renamed(tensors: Mapping[str, Any], certified: Sequence[str]) -> dict[str, Any]:
    """The tensors under the certificate's names, from which theirs may differ by the prefixes of wrappers."""
    bare, given = bare_names(certified), {short: name for name, short in bare_names(tensors).items()}
    other = {given[bare[name]]: name for name in certified if name not in tensors and bare[name] in given}
    return {other.get(name, name): value for name, value in tensors.items()}


def _stored(name: str, value: Any) -> Stored:
    try:
        return raw_tensor(value)
    except Exception as error:  # tensors of other kinds, and objects of other libraries, may raise anything
        raise CheckError(f"not proved: {word(name)} cannot be read: {error or type(error).__name__}") from error
