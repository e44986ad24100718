"""The certificate and its file: data only, free of torch. `certify` makes one, `verify` checks one."""

import math
import os
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from wellnormed._files import json_text, parse_json, write_atomically
from wellnormed.certificates.bound import UPWARD

FORMAT_VERSION = 2
ARITHMETIC = "real numbers, parameters as stored"
NORMS = "largest RMS of a token's entries, in and out"


@dataclass(frozen=True)
class Claim:
    """A proved bound on what a rule uses of a stored tensor."""

    measure: str
    """`spectral`: largest singular value of each part; `product`: that of `A_h^T B_h` for two tensors;
    `row_rms`: largest RMS over the last dimension; `positive_rms`: the same of positive entries alone; `max_abs`:
    largest entry."""
    tensors: tuple[str, ...]
    """Names among the model's tensors."""
    shape: tuple[int, ...]
    """Shape of the (first) tensor."""
    values: tuple[float, ...]
    """One per part; the first dimension is cut into that many equal parts."""


@dataclass(frozen=True)
class Row:
    """One operation: what it read, and what follows."""

    name: str
    rule: str
    inputs: tuple[str, ...]
    constants: dict[str, float]
    weights: tuple[Claim, ...]
    radius: tuple[Decimal, ...]
    lipschitz: tuple[Decimal, ...]


@dataclass(frozen=True)
class Certificate:
    """A Lipschitz bound with everything needed to derive it again.

    For all inputs `x`, `y` of the domain, `norm(f(x) - f(y)) <= lipschitz * norm(x - y)`, where the norm is
    the largest RMS over tokens. Made by `certify`; `verify` checks one against stored weights.
    """

    layers: tuple[Row, ...]
    """One row per operation, in order of execution; the last one is the model's output."""
    tensors: dict[str, str]
    """Name of every parameter and buffer -> SHA-256 over its dtype, shape and bytes."""
    domain: str
    """The inputs it speaks of."""
    input_radius: float
    """Largest RMS of an input token."""
    lower_bound: float | None = None
    """Largest gain that a search has met; not part of the proof."""
    norms: str = NORMS
    arithmetic: str = ARITHMETIC
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def exact_lipschitz(self) -> Decimal:
        """The bound as the decimal that was derived."""
        return max(self.layers[-1].lipschitz)

    @property
    def lipschitz(self) -> float:
        """The bound, rounded up; infinity if a float cannot hold it (see `log10_lipschitz`)."""
        return _float_up(self.exact_lipschitz)

    @property
    def log10_lipschitz(self) -> float:
        """Decimal logarithm of the bound, rounded up; -infinity for a constant model."""
        if not self.exact_lipschitz:
            return -math.inf
        return _float_up(UPWARD.next_plus(UPWARD.log10(self.exact_lipschitz)))

    @property
    def activation_rms(self) -> float:
        """Largest RMS that any token of any operation can reach, rounded up."""
        return _float_up(max(radius for row in self.layers for radius in row.radius))

    def with_lower_bound(self, value: float) -> "Certificate":
        """The same certificate with a measured gain beside the bound.

        Raises:
            ValueError: The value is negative, not finite, or exceeds the bound: certificate or search is wrong.
        """
        if not 0 <= value < math.inf:
            raise ValueError(f"lower_bound={value} must be finite and not negative")
        if Decimal(value) > self.exact_lipschitz:
            raise ValueError(
                f"lower_bound={value} exceeds the certified {self.lipschitz}: one is wrong. Check that both "
                "saw the same weights and radius; if they did, please report it: this may never happen"
            )
        return replace(self, lower_bound=float(value))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all."""
        write_atomically(Path(path), self._text())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Certificate":
        """Read a file that `save` wrote.

        Raises:
            ValueError: A byte differs from what `save` wrote, or the format version is another one.
        """
        content = Path(path).read_bytes()
        try:
            certificate = _certificate(parse_json(content, "its text", "it proves nothing", sealed=True))
            if certificate._text().encode() != content:
                raise ValueError("its bytes are not those that were written")
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"{path} is not an intact certificate ({error}); write it again with `Certificate.save`"
            ) from error
        return certificate

    def _text(self) -> str:
        document = asdict(self) | {"format": FORMAT_VERSION, "lipschitz": str(self.exact_lipschitz)}
        for row in document["layers"]:
            row |= {key: [str(number) for number in row[key]] for key in ("radius", "lipschitz")}
        return json_text(document, sealed=True, indent=1)

    def __str__(self) -> str:
        lines = [
            f"Lipschitz bound {_short(self.exact_lipschitz)}  (log10 {self.log10_lipschitz:.4f})",
            f"norms: {self.norms}",
            f"domain: {self.domain}",
            f"arithmetic: {self.arithmetic}",
        ]
        if self.lower_bound is not None:
            lines.append(f"largest gain found: {self.lower_bound:.6g}")
        width = max(len(row.name) for row in self.layers)
        rule_width = max(len(row.rule) for row in self.layers)
        lines.append(f"{'operation':{width}}  {'rule':{rule_width}}  {'RMS at most':>12}  {'Lipschitz':>12}")
        lines += [
            f"{row.name:{width}}  {row.rule:{rule_width}}  "
            f"{_short(max(row.radius)):>12}  {_short(max(row.lipschitz)):>12}"
            for row in self.layers
        ]
        return "\n".join(lines)


def _certificate(document: dict[str, Any]) -> Certificate:
    if document.pop("format", None) != FORMAT_VERSION:
        raise ValueError(f"its format version is not {FORMAT_VERSION}")
    del document["lipschitz"]  # made of the rows, like all bytes that `load` compares
    layers = tuple(
        Row(
            **_with_tuples(row, inputs=str, radius=Decimal, lipschitz=Decimal)
            | {"weights": tuple(Claim(**_with_tuples(w, tensors=str, shape=int, values=float)) for w in row["weights"])}
        )
        for row in document["layers"]
    )
    return Certificate(**document | {"layers": layers})


def _with_tuples(content: dict[str, Any], **kinds: type) -> dict[str, Any]:
    """The content with tuples in the place of some lists."""
    return content | {key: tuple(map(kind, content[key])) for key, kind in kinds.items()}


def _float_up(x: Decimal) -> float:
    nearest = float(x)
    return nearest if Decimal(nearest) >= x else math.nextafter(nearest, math.inf)


def _short(x: Decimal) -> str:
    return f"{x:.5g}" if Decimal("1e-4") < x < Decimal("1e6") or not x else f"{x:.4e}"
