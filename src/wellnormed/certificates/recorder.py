"""What rules write to: rows in order, proved claims on weights, and refusals that say where they happened."""

from collections.abc import Mapping
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

    A rule receives one as `step`. It reads constants from its module, proves claims on weights with
    `spectral`, `row_rms` and `max_abs`, and derives bounds with `derive`; `refuse` stops the certificate.

    Args:
        tensors: Name -> parameter or buffer, as in the model's state dict.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.rows: list[Row] = []
        self.where = "model"
        """Operation at work, for refusals."""
        self.name = "model"
        """Name of the rows that the operation at work derives."""
        self._tensors = dict(tensors)
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._claims: dict[tuple[str, tuple[str, ...], int], Claim] = {}
        self._taken: set[str] = set()

    def refuse(self, reason: str) -> UncertifiableError:
        """The error to raise, with the operation's place in the model."""
        return UncertifiableError(f"{self.where}: {reason}")

    def derive(
        self,
        rule: str,
        *inputs: Bound,
        constants: Mapping[str, float] | None = None,
        claims: tuple[Claim, ...] = (),
    ) -> Bound:
        """Apply a primitive and write its row.

        Args:
            rule: Name of a primitive (`algebra.PRIMITIVES`); `verify` knows the same ones.
            inputs: Bounds of its inputs.
            constants: Numbers that the executed layer applies, read from the layer.
            claims: What was proved of its weights.

        Returns:
            The bound of the output.

        Raises:
            UncertifiableError: A constant is not finite.
        """
        constants = {key: float(value) for key, value in (constants or {}).items()}
        if not all(Decimal(value).is_finite() for value in constants.values()):
            raise self.refuse(f"its constants {constants} are not finite; make them so")
        with rounding_up():
            bound = PRIMITIVES[rule](inputs, {key: Decimal(value) for key, value in constants.items()}, claims)
        name, repeats = self.name, 1
        while name in self._taken:
            repeats += 1
            name = f"{self.name}#{repeats}"
        self._taken.add(name)
        self.rows.append(
            Row(name, rule, tuple(x.row for x in inputs), constants, claims, bound.radius, bound.lipschitz)
        )
        return Bound(bound.radius, bound.lipschitz, name, bound.linear_in)

    def spectral(self, weight: Tensor, parts: int = 1) -> Claim:
        """Proved largest singular value of each of `parts` equal groups of rows of a matrix (l2 units)."""
        return self._claim("spectral", (weight,), parts)

    def product(self, left: str, right: str, parts: int) -> Claim:
        """Proved largest singular value of `A_h^T B_h` for the groups of rows of two named matrices."""
        return self._claim("product", (self._tensors[left], self._tensors[right]), parts)

    def row_rms(self, tensor: Tensor) -> Claim:
        """Proved largest RMS over the last dimension."""
        return self._claim("row_rms", (tensor,), 1)

    def max_abs(self, tensor: Tensor) -> Claim:
        """The largest absolute entry."""
        return self._claim("max_abs", (tensor,), 1)

    def _claim(self, name: str, tensors: tuple[Tensor, ...], parts: int) -> Claim:
        names = tuple(self._name(tensor) for tensor in tensors)
        key = (name, names, parts)
        if key not in self._claims:
            if not tensors[0].numel():
                raise self.refuse(f"{names[0]} is empty")
            arguments = (parts,) if name in ("spectral", "product") else ()
            values = getattr(measure, name)(*tensors, *arguments)
            self._claims[key] = Claim(name, names, tuple(tensors[0].shape), values)
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
