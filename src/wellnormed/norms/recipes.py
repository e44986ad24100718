"""Which role gets which norm: one line for every recipe.

Sources: Norm-Constrained LMOs (LMO), recommendation 3.1, tables 3 and 4, and the end of section 3;
Modular Duality (MD), table 1; Training Transformers with Enforced Lipschitz Bounds (LT), appendix F; Muon
(Jordan, 2024).
"""

from dataclasses import dataclass, replace
from typing import Literal

from wellnormed.norms.base import MatrixNorm, Norm
from wellnormed.norms.columns import ColNorm
from wellnormed.norms.convolution import SpectralConv
from wellnormed.norms.entries import Gain, Sign
from wellnormed.norms.roles import Role
from wellnormed.norms.slices import Split
from wellnormed.norms.spectral import RMS_TO_RMS, Spectral
from wellnormed.norms.vectors import BiasRMS

Recipe = Literal["modular", "language", "image", "tied", "sign-only", "muon"]
DEFAULT_RECIPE: Recipe = "modular"
_LOGITS = Sign(scaled=True)


@dataclass(frozen=True)
class Rules:
    """The norms of one recipe; None leaves a parameter to AdamW.

    Args:
        embedding: Of tables whose rows are the images of symbols.
        matrix: Of the others' matrices.
        last: Of the last `nn.Linear`.
        kernels: How `SpectralConv` takes kernels.
        pixels: Whether the first layer sees pixels, so that its unit is at least 1 (LMO insight 3.2 iii).
        vectors: The norm of biases; gains get `Gain` unless this is None.
    """

    embedding: Norm | None
    matrix: Spectral | Sign = RMS_TO_RMS
    last: Norm | None = _LOGITS
    kernels: Literal["positions", "patches"] = "patches"
    pixels: bool = False
    vectors: Literal["rms", "largest entry"] | None = "rms"

    def norm(self, role: Role, ndim: int) -> tuple[Norm | None, str]:
        """A role's norm, and the reason as the printed table gives it."""
        if role.kind == "matrix" and role.position in ("last", "both") and self.last != self.matrix:
            return self.last, f"last {role.layer} by order of registration"
        first = self.pixels and role.position in ("first", "both")
        return self._norm(role, ndim, first), f"first layer, {role.layer}" if first else role.layer

    def _norm(self, role: Role, ndim: int, first: bool) -> Norm | None:
        matrix = replace(self.matrix, scaling="pixels") if first and isinstance(self.matrix, Spectral) else self.matrix
        match role.kind:
            case "embedding":
                return self.embedding
            case "one-hot columns":
                return ColNorm() if isinstance(self.embedding, ColNorm) else self.embedding
            case "matrix" if role.transposed:
                if isinstance(matrix, Spectral):
                    return replace(matrix, input_axis=0)
                return Sign(scaled=True, output_axis=1)
            case "matrix":
                return matrix
            case "fused":
                return Split(role.parts, matrix) if isinstance(matrix, MatrixNorm) else matrix
            case "convolution":
                if isinstance(matrix, Sign):
                    return Sign(scaled=True, ndim=ndim, output_axis=int(role.transposed))
                return SpectralConv(ndim - 2, self.kernels, role.groups, role.transposed, matrix)
            case "gain":
                return Gain(ndim) if self.vectors else None
            case "vector":
                return {"rms": BiasRMS(ndim), "largest entry": Sign(ndim=ndim), None: None}[self.vectors]


RECIPES: dict[Recipe, Rules] = {
    "modular": Rules(ColNorm(0, max_inflation=16), last=RMS_TO_RMS, kernels="positions"),
    "language": Rules(ColNorm(0)),
    "image": Rules(ColNorm(0), pixels=True),
    "tied": Rules(Sign()),
    "sign-only": Rules(Sign(), matrix=Sign(scaled=True), vectors="largest entry"),
    "muon": Rules(None, last=None, vectors=None),
}
