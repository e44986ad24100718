"""The records of a certificate: its document, rows for the operations of a program, claims about stored tensors."""

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from wellnormed.proof.arithmetic import Arithmetic, Executed
from wellnormed.proof.decimals import Decimals
from wellnormed.proof.reading import Sizes, read


class Bounds(NamedTuple):
    """Bounds of every group of a tensor, for all inputs of the domain.

    Each array has as many axes as the tensor. An axis along which groups extend has size 1, and so has an axis along
    which all groups have equal bounds. Groups along the last axis of a tensor `(B, T, D)` have arrays `(B, T, 1)`, or
    `(1, 1, 1)`.
    """

    radius: Decimals
    """Largest Euclidean norm of the group."""
    gain: Decimals
    """Largest Euclidean norm of the group's change, over the size of the input's change in the certificate's norm."""
    largest: Decimals
    """Largest absolute value of an entry of the group."""
    error: Decimals
    """Largest Euclidean norm of the group's rounding errors; see `proof.arithmetic`."""


@dataclass(frozen=True)
class Claim:
    """A bound on stored tensors, on which a row rests."""

    measure: str
    """Name of the number that is bounded, such as `spectral`; `proof.claims.MEASURES` has all."""
    tensors: tuple[str, ...]
    """Names of the stored tensors."""
    values: tuple[float, ...]
    """The bounds: one, or one for each part, such as the heads of a projection."""
    constants: dict[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the measure, such as a convolution's stride."""


@dataclass(frozen=True, eq=False)
class Row:
    """One operation of a program, with the bounds of its result."""

    name: str
    operation: str
    """A primitive, which has bounds, or a move, which only rearranges, scales and adds."""
    inputs: tuple[str, ...]
    """Names of earlier rows."""
    shape: Sizes
    """Shape of the result for the example."""
    constants: dict[str, Any]
    """Numbers, lists of numbers, and names of stored tensors."""
    claims: tuple[Claim, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    """For each input of a primitive, the axes along which the groups extend whose bounds it uses."""
    axes: tuple[int, ...] = ()
    """The axes along which the groups of a primitive's result extend."""
    executed: Executed | None = None
    """How the row is executed in floats; without that, its rounding errors have no bound."""
    bounds: Bounds | None = None
    """The bounds that a row states before `Proof.add`, and the proved ones afterwards."""
    change: Decimals | None = None
    """As the error in the bounds, of the executed original: how far it is from the row's real value. None without an
    original."""


@dataclass(frozen=True)
class Document:
    """A certificate as its file states it; nothing is proved yet."""

    format: Literal[7]
    arithmetic: Literal["real numbers, tensors as stored"]
    tensors: dict[str, str]
    """Name -> SHA-256 of every tensor of the model that a row names."""
    computed: dict[str, str]
    """The same of the tensors that stand beside the certificate."""
    fixed: tuple[str, ...]
    """Names of the inputs that the certificate fixes."""
    promises: tuple[Any, ...]
    rows: tuple[Any, ...]
    """These two are read one at a time: the kernel need not hold all that it has read."""
    each_sample: bool
    lipschitz: Decimal
    rms_lipschitz: Decimal
    attention_logits: dict[str, tuple[Decimal, ...]]
    """Name of a row of attention -> the bounds of its heads' logits."""
    execution: Arithmetic | None
    """How sums and products are executed; null where rounding errors are left out."""
    unbounded_at: str
    """Name of the first row whose rounding errors have no bound; empty if all have one."""
    original: dict[str, str] | None = None
    """Name -> name of the tensor that the original program has in its place; null without an original."""
    comparison: Any = None
    """This and the next fields are not about the proof."""
    lower_bound: Any = None
    versions: Any = None
    digest: Any = None


def read_row(x: Any) -> Row:
    """Read a row; the types of its constants and of its claims' settings are checked by `Proof.add`."""
    fields = read(dict[str, Any], x, "the row")
    stated = {what: fields.pop(what, None) for what in Bounds._fields}
    bounds = None if all(each is None for each in stated.values()) else stated
    return read(Row, {**fields, "bounds": bounds}, "the row")
