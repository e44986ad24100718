"""The certificate and its file: data only. `certify` makes one, `verify` proves it again, `printing` describes it."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import save as save_tensors
from torch import Tensor

from wellnormed._files import json_text, parse_json, write_atomically
from wellnormed._inputs import require_numbers
from wellnormed._ranges import NOT_NEGATIVE
from wellnormed.certificates import printing
from wellnormed.certificates.document import ARITHMETIC, FORMAT_VERSION, fields_of, read_computed, row_document
from wellnormed.certificates.radius import certified_radius, settled, unchanged
from wellnormed.certificates.sizes import UNITS, Bound, entries_of, greatest, group_size, largest_rms, slope
from wellnormed.lowering.stored import raw_tensor
from wellnormed.program.comparing import Comparison
from wellnormed.program.domain import Box, Domain, domain_of
from wellnormed.program.program import Program
from wellnormed.proof import Promise, Row
from wellnormed.proof.arithmetic import Arithmetic
from wellnormed.proof.check import change_of
from wellnormed.proof.decimals import root_down, rounding_up

_DAMAGE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError, SafetensorError,
)  # fmt: skip
"""The errors in which reading a damaged document ends."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """A Lipschitz bound with everything needed to derive it again.

    For all inputs `x`, `y` of the domain, `norm(f(x) - f(y)) <= lipschitz * norm(x - y)`. Both norms are the largest
    Euclidean norm over groups of entries: over the tokens of a sequence, or over whole images. Made by `certify`;
    `verify` proves one again from stored weights. Certificates are equal if their files are.
    """

    rows: tuple[Row, ...]
    """One row per operation, in order of execution; the last one is the model's output."""
    tensors: dict[str, str]
    """Name of every stored tensor that the result depends on -> SHA-256 over its dtype, shape and bytes."""
    computed: dict[str, Tensor]
    """Tensors that the certificate's file contains because the model's state dict does not: those that the model
    computes, such as rotary tables, and the fixed inputs."""
    promises: tuple[Promise, ...] = ()
    """Caps on parameters that the proof uses instead of their entries: it holds for all weights within these caps."""
    fixed: tuple[str, ...] = ()
    """Names in `computed` of inputs, such as masks, that keep the values of the example, except in table lookups."""
    attention_logits: dict[str, tuple[Decimal, ...]] = field(default_factory=dict)
    """Row of an attention -> a bound for each head on the size of its logits for any input, before masks and biases."""
    each_sample: bool = False
    """Whether the bound holds for each sample of a batch of any size; if not, for inputs of these shapes as a whole."""
    comparison: Comparison | None = None
    """How the model's code was compared with the certified program; not part of the proof."""
    program: Program | None = None
    """The certified program, a function of the example's tensors that shares the model's weights. None in a certificate
    that was read from a file; `export` writes the program."""
    lower_bound: float | None = None
    """Largest gain that a search has found, in Euclidean norms; not part of the proof."""
    execution: Arithmetic | None = None
    """How sums and products are executed, beyond the dtypes of the graph; None where rounding errors are left out."""
    unbounded_at: str = ""
    """Name of the first row whose rounding errors have no bound; empty if all have one."""
    original: dict[str, str] | None = None
    """Name of a tensor -> name, in `tensors` or `computed`, of the one in its place in the original model with which
    `certify(original=...)` compared this one; None without an original."""
    arithmetic: str = ARITHMETIC
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[Row, ...]:
        """The rows that bound something; the others only move entries, scale and add."""
        return tuple(row for row in self.rows if row.bounds is not None)

    @property
    def rounds(self) -> dict[str, tuple[str, ...]]:
        """Dtype -> the rows that round to it. The proof, which is in real arithmetic, counts them as the identity.

        Only tensors that depend on the input count. Weights that the model converts are proved with converted values.
        """
        conversions: dict[str, tuple[str, ...]] = {}
        for row in self.rows:
            if row.operation == "rounding":
                dtype = row.constants["dtype"]
                conversions[dtype] = (*conversions.get(dtype, ()), row.name)
        return conversions

    @property
    def lipschitz(self) -> Bound:
        """Largest Euclidean norm of a change of a group of the result, over the largest of a group of the inputs.

        It is rounded up to a float; its members `exact` and `log10` hold what a float cannot.
        """
        return Bound(slope(self.rows[-1], entries_of(self.rows, "euclidean")))

    @property
    def rms_lipschitz(self) -> Bound:
        """As `lipschitz`, with the root mean square (RMS) of groups, the unit of papers on norm-based training."""
        return Bound(largest_rms(self.rows[-1], "gain"))

    @property
    def forward_error(self) -> Bound | None:
        """Largest Euclidean norm of what executing the program in floats changes in a group of its result.

        It holds for every input of the domain, every batch and every order of summation; see `docs/rounding.md` for
        what it assumes. None if the rounding errors of some operation have no bound: `unbounded_at` names the first.

        Example:
            >>> import torch, wellnormed as wn
            >>> certificate = wn.certify(torch.nn.Linear(100, 10), torch.zeros(1, 100))
            >>> 1e-6 < certificate.forward_error < 1e-3
            True
        """
        return None if self.unbounded_at else Bound(greatest(self.rows[-1], "error"))

    @property
    def rms_forward_error(self) -> Bound | None:
        """As `forward_error`, in root mean square of a group of the result."""
        return None if self.unbounded_at else Bound(largest_rms(self.rows[-1], "error"))

    @property
    def change(self) -> Bound | None:
        """Largest Euclidean norm of the difference of a group of the result and of the original model's.

        It holds for every input of the domain, and counts the rounding errors of both; with `arithmetic="real"`, both
        results are of real arithmetic. None without an original, or where an operation has no such bound, which
        `statement()` names.

        Example:
            >>> import copy, torch, wellnormed as wn
            >>> model = torch.nn.Linear(4, 2)
            >>> pruned = copy.deepcopy(model)
            >>> pruned.weight.data[0, 0] = 0
            >>> certificate = wn.certify(pruned, torch.zeros(1, 4), original=model)
            >>> abs(model.weight[0, 0].item()) <= certificate.change / 2 <= abs(model.weight[0, 0].item()) + 1e-4
            True
        """
        change = change_of(self.rows, self.execution)
        return None if change is None else Bound(change)

    @property
    def rms_change(self) -> Bound | None:
        """As `change`, in root mean square of a group of the result."""
        with rounding_up():
            change = change_of(self.rows, self.execution)
            return None if change is None else Bound(change / root_down(group_size(self.rows[-1])))

    @property
    def margin(self) -> Bound | None:
        """Largest change of the difference of two logits, as `lipschitz` measures it; None unless asked.

        A prediction whose best logit leads by `gap` stays for all changes shorter than `gap / margin`.
        """
        rows = [row for row in self.rows if row.operation == "margin"]
        return Bound(slope(rows[0], entries_of(self.rows, "euclidean"))) if rows else None

    def certified_radius(self, logits: Tensor, std: float | Sequence[float] = 1.0, *, dim: int | None = None) -> Tensor:
        """How far the input may move, in the Euclidean norm, while the largest logit stays the largest.

        No input of the certificate's domain within this distance is classified otherwise; certify with
        `radius=math.inf`, or with `box=(0, 1)` for pixels. The radius is the gap of the two largest logits over a bound
        on how fast any gap changes: `sqrt(2)` times the constant, or `margin` if `certify(margins=True)` derived it and
        it is smaller. From the gap of executed logits, twice that is taken which rounding may add to it: `sqrt(2)`
        times `forward_error`, once for this input and once for the moved one. A gap that is not larger has the radius
        0. The radius does not say whether the class is correct.

        Args:
            logits: Results of the certified program, `(..., classes)` unless `dim` says otherwise, in its dtype or a
                wider one.
            std: The number by which the pixels were divided *before* the model, or one for each channel: the radius is
                then in pixels of the channel with the smallest. A model whose first operation standardises its input
                needs none, and its radius is larger.
            dim: The axis of classes of the certified result. It is needed where a group of the result, as `norms`
                states it, extends along several axes: a class for each pixel of an image lies along `dim=1`.

        Returns:
            Float64, of the shape of the logits without the axis of classes: the Euclidean length of a change of the
            whole sample, or of each token; with several inputs, of a group of each.

        Raises:
            ValueError: The logits have another shape or fewer digits than the program's, or are not finite; `dim` is
                needed or no axis of groups; std is not positive; or the rounding errors have no bound, and `certify`
                was not asked for `arithmetic="real"`.

        Example:
            >>> import torch, wellnormed as wn
            >>> model = torch.nn.Linear(2, 2, bias=False)
            >>> _ = model.weight.data.copy_(torch.eye(2))
            >>> certificate = wn.certify(model, torch.zeros(1, 2), radius=float("inf"), arithmetic="real")
            >>> x = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
            >>> certificate.certified_radius(model(x))  # (1, 1) is the nearest input with a tie, at sqrt(2)
            tensor([1.4142, 0.0000], dtype=torch.float64)
        """
        return certified_radius(self, logits, std, dim)

    def settled(
        self, logits: Tensor, against: Literal["machines", "real"] = "machines", *, dim: int | None = None
    ) -> Tensor:
        """Which predictions no machine, batch, kernel or order of sums can change: a boolean tensor `(...)`.

        The largest executed logit leads by more than `2 sqrt(2) forward_error`, which is the most by which two
        executions of the program, in the arithmetic that the certificate states, change the difference of two logits.

        Args:
            logits: Results of the certified program, `(..., classes)` unless `dim` says otherwise, executed on inputs
                of the domain, in its dtype or a wider one.
            against: With `"real"`, which predictions are those of the function in real arithmetic: half of the lead
                shows it. Then other machines agree that compute what is not settled in more digits.
            dim: The axis of classes, as for `certified_radius`.

        Raises:
            ValueError: The logits have another shape or fewer digits than the program's, or are not finite; `dim` is
                needed or no axis of groups; the rounding errors have no bound; or `against` is neither word.

        Example:
            >>> import torch, wellnormed as wn
            >>> certificate = wn.certify(torch.nn.Linear(3, 2), torch.zeros(1, 3))
            >>> certificate.settled(torch.tensor([[0.5, 0.25], [0.5, 0.5 + 1e-7]]))
            tensor([ True, False])
        """
        return settled(self, logits, against, dim)

    def unchanged(self, logits: Tensor, *, dim: int | None = None) -> Tensor:
        """Which predictions are the original model's, too: a boolean tensor `(...)`; see `certify(original=...)`.

        The largest logit leads by more than `sqrt(2) change`, or, with `margins=True`, by more than the distances of
        the last map's rows allow. So no execution of one program predicts otherwise than these logits of the other.

        Args:
            logits: Results of the certified program or of the original, as for `settled`.
            dim: The axis of classes, as for `certified_radius`.

        Raises:
            ValueError: As for `settled`; or there is no original, or no bound of the change.
        """
        return unchanged(self, logits, dim)

    @property
    def largest_logit(self) -> Bound | None:
        """The largest of `attention_logits`, rounded up; None for a model without attention."""
        logits = [each for heads in self.attention_logits.values() for each in heads]
        return Bound(max(logits)) if logits else None

    @property
    def activation_rms(self) -> Bound:
        """Largest RMS that a group of the result of an operation with bounds can reach, rounded up.

        Operations that only move, scale or add entries, such as residual sums, have no bounds of their own and do not
        count.
        """
        return Bound(max(largest_rms(row, "radius") for row in self.layers))

    @property
    def norms(self) -> str:
        """Both norms in words, from the rows."""
        return printing.norms(self)

    @property
    def domain(self) -> str:
        """The inputs that the bound holds for, in words, from the rows."""
        return printing.domain(self)

    @property
    def compared(self) -> str:
        """How the model's code was compared with the program, in words."""
        return printing.compared(self)

    @property
    def input_domain(self) -> Domain:
        """The least domain of an input: the largest RMS of a group, infinity, or the `Box` of the entries."""
        domains = [domain_of(row.constants) for row in self.inputs]
        return min(domains, key=lambda each: each.high - each.low if isinstance(each, Box) else each)

    @property
    def token_distance(self) -> Bound | None:
        """Largest Euclidean distance of two vectors that an embedding looks up, proved; None without tokens."""
        distances = [Decimal(row.claims[1].values[0]) for row in self.inputs if row.claims]
        return Bound(max(distances)) if distances else None

    @property
    def substitution(self) -> Bound | None:
        """Largest Euclidean norm of a change of a group of the result when tokens are replaced; None without tokens.

        It is `lipschitz * token_distance` (less where tables differ in width), or twice the largest result if that is
        less. A change of the input has the size of its most changed token, so the number of replaced tokens does not
        matter. If an input is in `fixed` because the model uses its integers for more than lookups, those other uses
        keep the example's values.
        """
        tables, last = [row for row in self.inputs if row.claims], self.rows[-1]
        with rounding_up():
            changes = [slope(last, group_size(row)) * Decimal(row.claims[1].values[0]) for row in tables]
            return Bound(min(max(changes), 2 * greatest(last, "radius"))) if tables else None

    @property
    def inputs(self) -> list[Row]:
        """The rows of the certified variables."""
        return [row for row in self.rows if row.operation == "input"]

    @property
    def rms_lower_bound(self) -> float | None:
        """`lower_bound` with RMS in place of Euclidean norms."""
        if self.lower_bound is None:
            return None
        entries = [entries_of(self.rows, unit) for unit in UNITS]
        return self.lower_bound * math.sqrt(entries[0] / entries[1])

    def with_lower_bound(self, value: float) -> "Certificate":
        """The same certificate with a measured gain, in Euclidean norms, beside the bound.

        Raises:
            ValueError: The value is negative, not finite, or exceeds the bound, so that one of both is wrong.
        """
        require_numbers("with_lower_bound: ", {"value": value}, NOT_NEGATIVE)
        if Decimal(float(value)) > self.lipschitz.exact:
            raise ValueError(
                f"lower_bound={value} exceeds the certified {self.lipschitz}: one is wrong. Check that both "
                "saw the same weights and domain; if they did, please report it: this may never happen"
            )
        return replace(self, lower_bound=float(value))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate to `path`; computed tensors, if any, to that path with the ending `.safetensors`."""
        path = Path(path)
        tensors = path.with_suffix(".safetensors")
        if self.computed:
            write_atomically(tensors, save_tensors(self.computed))
        write_atomically(path, self.text())
        if not self.computed:
            tensors.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Certificate":
        """Read a file that `save` wrote.

        Raises:
            ValueError: A byte differs from what `save` wrote, or the format version is another one.
        """
        path = Path(path)
        content = path.read_bytes()
        try:
            document = parse_json(content, "its text", "it proves nothing", sealed=True)
            computed = read_computed(path.with_suffix(".safetensors"), document["computed"])
            certificate = cls(computed=computed, **fields_of(document))
            if certificate.text().encode() != content:
                raise ValueError("its bytes are not those that were written")
            if certificate.lower_bound is not None:
                certificate.with_lower_bound(certificate.lower_bound)
        except _DAMAGE as error:
            raise ValueError(
                f"{path} is not an intact certificate ({error}); write it again with `Certificate.save`"
            ) from error
        return certificate

    def document(self) -> dict[str, Any]:
        """The content of the file as a dictionary, as `proof.check` reads it."""
        return {
            "format": FORMAT_VERSION,
            "arithmetic": self.arithmetic,
            "lipschitz": str(self.lipschitz.exact),
            "rms_lipschitz": str(self.rms_lipschitz.exact),
            "each_sample": self.each_sample,
            "execution": None if self.execution is None else asdict(self.execution),
            "unbounded_at": self.unbounded_at,
            "lower_bound": self.lower_bound,
            "attention_logits": {name: list(map(str, heads)) for name, heads in self.attention_logits.items()},
            "rows": [row_document(row) for row in self.rows],
            "tensors": self.tensors,
            "fixed": list(self.fixed),
            **({} if self.original is None else {"original": self.original}),
            "promises": [asdict(promise) for promise in self.promises],
            "comparison": None if self.comparison is None else asdict(self.comparison),
            "computed": {name: raw_tensor(tensor).digest for name, tensor in sorted(self.computed.items())},
            "versions": self.versions,
        }

    def text(self) -> str:
        """The content of the file."""
        return json_text(self.document(), sealed=True, indent=1)

    def statement(self) -> str:
        """What is proved, how the model's code was compared with the proved program, and what was not compared."""
        return printing.statement(self)

    def __eq__(self, other: object) -> bool:
        return self.text() == other.text() if isinstance(other, Certificate) else NotImplemented

    def __str__(self) -> str:
        return printing.table(self)

    __repr__ = __str__
