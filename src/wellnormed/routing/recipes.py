"""The recipes: the norm and radius of every role, in one line each.

Sources: Norm-Constrained LMOs (LMO), recommendation 3.1, tables 3 and 4, and the end of section 3; its released code
for the recipes with radii; Modular Duality (MD), table 1; Training Transformers with Enforced Lipschitz Bounds (LT),
appendix F; Muon (Jordan, 2024).
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from wellnormed.norms.base import Norm
from wellnormed.norms.convolution import SpectralConv
from wellnormed.norms.entries import Gain, Sign
from wellnormed.norms.root_mean_square import BiasRMS, ColNorm
from wellnormed.norms.slices import Experts, PerHead, Split
from wellnormed.norms.spectral import RMS_TO_RMS, MatrixNorm, Spectral
from wellnormed.routing.roles import Role

RecipeName = Literal[
    "modular", "language", "image", "sign-only", "muon", "scion-gpt", "scion-shakespeare", "scion-mlp", "scion-cnn"
]
DEFAULT_RECIPE: RecipeName = "modular"
_LOGITS = Sign(normalized=True)


class Radii(NamedTuple):
    """Radii of the norm balls by role, in units of the norms."""

    embedding: float = 1.0
    hidden: float = 1.0
    last: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """The norms of one recipe by role; None leaves a parameter to AdamW."""

    embedding: Norm | None  # of tables whose rows are the images of symbols
    matrix: Spectral | Sign = RMS_TO_RMS  # of all other matrices but the last
    last: Norm | None = _LOGITS  # of the last nn.Linear
    kernels: Literal["positions", "patches"] = "patches"  # the mode of SpectralConv
    pixels: bool = False  # whether the first layer sees pixels, so that its unit is at least 1 (LMO insight 3.2 iii)
    vectors: Literal["rms", "largest entry"] | None = "rms"  # the norm of biases; gains get Gain unless it is None
    tied: Literal["embedding", "last"] = "embedding"  # whose norm a table gets that is both
    radii: Radii = Radii()  # noqa: RUF009 (a tuple): the published ones; vectors have that of hidden layers
    by_start: bool = False  # whether vectors, gains, embeddings and kernels have radii of `starting_radii`
    lr: float = 0.02  # the learning rate that is published, or that our runs recommend (docs/optimizers.md)

    def serves(self, role: Role) -> bool:
        """Whether the recipe has a norm for the role; a recipe of signs has none for experts."""
        return role.kind != "experts" or isinstance(self.matrix, MatrixNorm)

    def norm(self, role: Role, ndim: int, per_head: bool) -> tuple[Norm | None, float | None, str]:
        """A role's norm, its radius (None if `starting_radii` decides it), and the reason for the printed table."""
        if role.last and self.last != self.matrix:
            return self.last, self.radii.last, f"last {role.layer}"
        first = self.pixels and role.first
        by_head = role.heads > 1 and (per_head or role.by_head) and isinstance(self.matrix, Spectral)
        norm = self._norm(role, ndim, first, by_head)
        radius = self.radii.embedding if role.kind in ("embedding", "one-hot columns") else self.radii.hidden
        if self.by_start:
            radius = None if role.kind in ("embedding", "vector", "gain") else radius * role.positions
        return norm, radius, f"first layer, {role.layer}" if first else role.layer + ", by heads" * by_head

    def _norm(self, role: Role, ndim: int, first: bool, by_head: bool) -> Norm | None:
        matrix = self.matrix
        if isinstance(matrix, Spectral) and (first or by_head):
            matrix = replace(matrix, units="l2" if by_head else "pixels")
        match role.kind:
            case "embedding":
                return self.embedding
            case "one-hot columns":
                return ColNorm() if isinstance(self.embedding, ColNorm) else self.embedding
            case "matrix":
                return _of_matrix(matrix, role, by_head)
            case "experts":
                return Experts(_of_matrix(matrix, role, by_head))  # pyrefly: ignore[bad-argument-type]
            case "attention bias":
                return Sign() if self.vectors else None
            case "convolution":
                if isinstance(matrix, Sign):
                    return Sign(normalized=True, ndim=ndim, output_axis=int(role.transposed))
                return _cut(
                    SpectralConv(ndim - 2, self.kernels, role.groups, role.transposed, matrix), role, 0, by_head
                )
            case "gain":
                return Gain(ndim) if self.vectors else None
            case "vector":
                return {"rms": BiasRMS(ndim), "largest entry": Sign(ndim=ndim), None: None}[self.vectors]


def _of_matrix(matrix: Spectral | Sign, role: Role, by_head: bool) -> Norm:
    """The norm of a matrix as it is stored, and of each of its parts where several are fused into one."""
    if isinstance(matrix, Sign):
        return replace(matrix, output_axis=1) if role.transposed else matrix
    return _cut(replace(matrix, input_axis=0) if role.transposed else matrix, role, int(role.transposed), by_head)


def _cut(whole: MatrixNorm, role: Role, dim: int, by_head: bool) -> Norm:
    """The norm of a weight whose parts or heads lie along one dimension.

    A head has the unit "l2", in which its step is as long as its share of a step of the whole projection; with "rms" it
    would be shorter by the root of the number of heads.
    """
    if by_head and not role.by_head:
        return PerHead(role.heads, whole, dim)
    parts = whole if role.parts == 1 else Split(role.parts, whole, dim)
    return PerHead(role.heads, parts, dim) if by_head else parts


RECIPES: dict[RecipeName, Recipe] = {
    # MD table 1; LT appendix F
    "modular": Recipe(ColNorm(0, max_inflation=16), last=RMS_TO_RMS, kernels="positions", by_start=True),
    # LMO recommendation 3.1 (ii), 3.1 (i), and the end of section 3
    "language": Recipe(ColNorm(0)),
    "image": Recipe(ColNorm(0), pixels=True, lr=0.16),
    "sign-only": Recipe(Sign(), matrix=Sign(normalized=True), vectors="largest entry", tied="last", lr=0.08),
    # Jordan (2024)
    "muon": Recipe(None, last=None, vectors=None),
    # LMO released code: nanoGPT with tied weights (recommendation 3.1 iii), transfer on Shakespeare, MLP, airbench
    "scion-gpt": Recipe(ColNorm(0), tied="last", radii=Radii(50.0, 50.0, 3000.0), lr=2.0**-12),
    "scion-shakespeare": Recipe(Sign(), radii=Radii(1.0, 3.0, 10.0)),
    "scion-mlp": Recipe(ColNorm(0), pixels=True, radii=Radii(last=2.0**10), lr=2.0**-6),
    "scion-cnn": Recipe(ColNorm(0), pixels=True, radii=Radii(8.0, 8.0, 128.0), lr=0.05),
}
