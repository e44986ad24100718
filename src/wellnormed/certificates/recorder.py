"""What rules write to: rows in order, proved claims on weights, and refusals that say where they happened."""

from collections.abc import Callable, Mapping
from decimal import Decimal

import torch
from torch import Tensor

from wellnormed.certificates import measure
from wellnormed.certificates.algebra import PRIMITIVES
from wellnormed.certificates.bound import Bound, rounding_up
from wellnormed.certificates.certificate import Claim, Row


class UncertifiableError(ValueError):
    """The model does something that no rule bounds; names the operation, the module and the model's line."""


class Recorder:
    """Collects the rows of a certificate while rules are applied.

    A rule receives one as `step`. It reads constants from its module, proves claims on weights with `spectral`,
    `row_rms`, `positive_rms` and `max_abs`, and derives bounds with `derive`; `refuse` stops the certificate.

    Args:
        tensors: Name -> parameter or buffer, as in the model's state dict.
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
        self._claims: dict[tuple[str, tuple[str, ...], tuple[int, ...]], Claim] = {}

    def refuse(self, reason: str) -> UncertifiableError:
        """The error to raise, with the operation's place in the model."""
        return UncertifiableError(f"{self.where}: {reason}")

    def derive(
        self, rule: str, *inputs: Bound, constants: Mapping[str, float] | None = None, claims: tuple[Claim, ...] = ()
    ) -> Bound:
        """Apply a primitive, write its row and return the bound of the output.

        Args:
            rule: Name of a primitive (`algebra.PRIMITIVES`); `verify` knows the same ones.
            inputs: Bounds of its inputs.
            constants: Numbers that the executed layer applies, read from the layer.
            claims: What was proved of its weights.

        Raises:
            UncertifiableError: A constant is not finite.
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

    def spectral(self, weight: Tensor, parts: int = 1) -> Claim:
        """Proved largest singular value of each of `parts` equal groups of rows of a matrix (l2 units)."""
        return self._claim(measure.spectral, (weight,), parts)

    def product(self, left: str, right: str, parts: int) -> Claim:
        """Proved largest singular value of `A_h^T B_h` for the groups of rows of two named matrices."""
        return self._claim(measure.product, (self._tensors[left], self._tensors[right]), parts)

    def row_rms(self, tensor: Tensor) -> Claim:
        """Proved largest RMS over the last dimension."""
        return self._claim(measure.row_rms, (tensor,))

    def positive_rms(self, tensor: Tensor) -> Claim:
        """Proved largest RMS over the last dimension, of positive entries alone."""
        return self._claim(measure.positive_rms, (tensor,))

    def max_abs(self, tensor: Tensor) -> Claim:
        """The largest absolute entry."""
        return self._claim(measure.max_abs, (tensor,))

    def _claim(self, proof: Callable[..., tuple[float, ...]], tensors: tuple[Tensor, ...], *parts: int) -> Claim:
        names = tuple(self._name(tensor) for tensor in tensors)
        key = (proof.__name__, names, parts)
        if key not in self._claims:
            if not tensors[0].numel():
                raise self.refuse(f"{names[0]} is empty")
            self._claims[key] = Claim(proof.__name__, names, tuple(tensors[0].shape), proof(*tensors, *parts))
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
