"""What rules write to: rows in order, proved claims on weights, and refusals that say where they happened."""

from collections.abc import Mapping
from decimal import Decimal

import torch
from torch import Tensor

from wellnormed.certificates.algebra import PRIMITIVES
from wellnormed.certificates.bound import Bound, rounding_up
from wellnormed.certificates.certificate import Claim, Row
from wellnormed.certificates.measure import MEASURES


class UncertifiableError(ValueError):
    """The model does something that no rule bounds; names the operation, the module and the model's line."""


class Recorder:
    """Collects the rows of a certificate while rules are applied.

    A rule receives one as `step`. It reads constants from its module, proves claims on weights with `prove` and
    derives bounds with `derive`; `refuse` stops the certificate. `tensors` are those of the model's state dict.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.rows: dict[str, Row] = {}
        """Rows by name, in order."""
        self.where = "model"
        """Operation at work, for refusals."""
        self.name = "model"
        """Name of the rows that the operation at work derives."""
        self._tensors = tensors
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._claims: dict[tuple, Claim] = {}

    def refuse(self, reason: str) -> UncertifiableError:
        """The error to raise, with the operation's place in the model."""
        return UncertifiableError(f"{self.where}: {reason}")

    def derive(
        self, rule: str, *inputs: Bound, constants: Mapping[str, float] | None = None, claims: tuple[Claim, ...] = ()
    ) -> Bound:
        """Apply a primitive of `algebra.PRIMITIVES`, write its row and return the bound of the output.

        The constants are the numbers that the executed layer applies, read from the layer, and refused if they are not
        finite; the claims are what `prove` returned for its weights.
        """
        constants = {key: float(value) for key, value in (constants or {}).items()}
        exact = {key: Decimal(value) for key, value in constants.items()}
        if not all(value.is_finite() for value in exact.values()):
            raise self.refuse(f"its constants {constants} are not finite; make them so")
        with rounding_up():
            bound = PRIMITIVES[rule](inputs, exact, claims)
        name, repeats = self.name, 1
        while name in self.rows:
            repeats += 1
            name = f"{self.name}#{repeats}"
        read = tuple(x.row for x in inputs)
        self.rows[name] = Row(name, rule, read, constants, claims, bound.radius, bound.lipschitz)
        return Bound(bound.radius, bound.lipschitz, name, bound.linear_in)

    def prove(self, measure: str, *tensors: Tensor | str, **parts: int) -> Claim:
        """A proved bound on what a rule uses of stored tensors, given as such or by name.

        The measures are those of `Claim`. For `spectral` and `product`, `parts=n` proves a bound for each of n equal
        groups of rows.
        """
        stored = [self._tensors[tensor] if isinstance(tensor, str) else tensor for tensor in tensors]
        names = tuple(map(self._name, stored))
        key = (measure, names, *parts.values())
        if key not in self._claims:
            if not stored[0].numel():
                raise self.refuse(f"{names[0]} is empty")
            self._claims[key] = Claim(measure, names, tuple(stored[0].shape), MEASURES[measure](*stored, **parts))
        return self._claims[key]

    def _name(self, tensor: Tensor) -> str:
        name = self._names.get(id(tensor))
        if name is None:
            raise self.refuse(
                "it uses a tensor that is not in the model's state dict, so no file could vouch for it; "
                "register it as a parameter or a persistent buffer"
            )
        if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise self.refuse(f"{name} is a {type(tensor).__name__}, whose values its operations may compute anew")
        return name
