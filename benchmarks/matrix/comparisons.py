"""Contenders to time on the same inputs, in groups, and the pairs of them that make rows of the table.

`speed` runs them. Errors are spectral, of the first matrix of a batch: of caps over the largest singular value, of
`msign` from the polar factor (so that sets of coefficients compare), of weights as the docstring of each group says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from papers import published_matrix
from wellnormed.matrix import msign, spectral_hardcap, spectral_normalize

from . import peers
from .inputs import gaussian, shown, with_singular_values
from .reference import Reference, spectral_norm

CAP = 1.0
SMALL = 2**19
"""Entries up to which the slowest are timed: the blockwise form, and gram-newton-schulz, whose float16 products take
seconds for one 768 x 768 matrix on a CPU."""


@dataclass(frozen=True)
class Contender:
    """Something to time; a string says why it cannot run."""

    call: Callable[[], object] | str
    error: Callable[[Tensor], float] | None = None


@dataclass(frozen=True)
class Row:
    """One row of the table: names of contenders of its group."""

    function: str
    input: str
    ours: str
    peer: str


@dataclass
class Group:
    """Contenders that are timed in turn."""

    contenders: dict[str, Contender] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


def _first(value: Tensor) -> Tensor:
    return value.detach().reshape(-1, *value.shape[-2:])[0]


def caps(shape: tuple[int, ...]) -> Group:
    """The hard cap of Gaussian matrices just after a step (1.5 x cap) and far above it (10 x cap).

    The block form does the same work whatever the values and takes seconds, so it is timed in one situation.
    """
    group = Group()
    base = gaussian(*shape)
    for ratio in (1.5, 10.0):
        w = (base * ratio).float()

        def error(value: Tensor, reference=Reference(_first(w))) -> float:  # noqa: B008
            return reference.error(_first(value), lambda s: s.clamp_max(CAP))

        situation = f"{ratio:g} x cap"
        for name in ("SC nested", "SC block", "SC blockwise", "torch SVD"):
            key = f"{name}, {situation}"
            if name == "SC blockwise" and (ratio != 1.5 or base.numel() > SMALL):
                continue
            if name == "SC block" and ratio != 1.5:
                key = "SC block, 1.5 x cap"
            elif name == "torch SVD":
                group.contenders[key] = Contender(partial(peers.svd_cap, w, CAP), error)
            else:
                call = partial(published_matrix.clip, w, None, CAP, name.removeprefix("SC "))
                group.contenders[key] = Contender(call, error)
            ours = f"ours, {situation}"
            group.rows.append(Row("spectral_hardcap", f"{shown(shape)}, {situation}", ours, key))
        group.contenders[f"ours, {situation}"] = Contender(partial(spectral_hardcap, w, CAP), error)
    return group


def signs(shape: tuple[int, ...]) -> Group:
    """The matrix sign of well-conditioned (0.5 to 1) and ill-conditioned (1e-5 to 1, even in logarithm) matrices.

    Equal accuracy is the same set of coefficients: ours with "jordan-5" against the plain loop with "jordan-5", and
    in bfloat16 against `torch.optim.Muon`. The default set, of eight steps, is listed beside.
    """
    group = Group()
    n = min(shape[-2:])
    for situation, values in (("well", torch.linspace(0.5, 1, n)), ("ill", torch.logspace(-5, 0, n))):
        seeds = range(shape[0] if len(shape) == 3 else 1)
        batch = [with_singular_values(values, *shape[-2:], seed=seed) for seed in seeds]
        x = torch.stack(batch).reshape(shape).float()
        half = x.bfloat16()

        def error(value: Tensor, reference=Reference(_first(x))) -> float:  # noqa: B008
            return reference.error(_first(value), torch.ones_like, 1.0)

        calls: dict[str, Callable[[], object] | str] = {
            "ours": partial(msign, x),
            "ours, jordan-5": partial(msign, x, "jordan-5"),
            "ours, jordan-5, bfloat16": partial(msign, half, "jordan-5"),
            "plain jordan-5": partial(peers.plain_newton_schulz, x),
            "torch.optim.Muon, bfloat16": partial(peers.torch_muon, x),
            "torch SVD": partial(peers.svd_sign, x),
        }
        if x.numel() <= SMALL:
            library = peers.gram_newton_schulz()
            calls["gram-newton-schulz, float16"] = library if isinstance(library, str) else partial(library, x)
        group.contenders |= {f"{name}, {situation}": Contender(call, error) for name, call in calls.items()}
        pairs = (
            ("ours, jordan-5", "plain jordan-5"),
            ("ours", "plain jordan-5"),
            ("ours, jordan-5, bfloat16", "torch.optim.Muon, bfloat16"),
            ("ours", "torch.optim.Muon, bfloat16"),
            ("ours", "torch SVD"),
            ("ours", "gram-newton-schulz, float16"),
        )
        for ours, peer in pairs:
            if peer not in calls:
                continue
            label = f"{shown(shape)}, {situation}-conditioned"
            function = "msign" + ours.removeprefix("ours")
            group.rows.append(Row(function, label, f"{ours}, {situation}", f"{peer}, {situation}"))
    return group


def orthonormal(shape: tuple[int, int]) -> Group:
    """A weight with orthonormal rows or columns; the error is `|W^T W - I|` of the small side.

    The peers parametrise such weights; only ours and Björck's iteration give the one nearest to the input.
    """
    x = gaussian(*shape).float()

    def error(value: Tensor) -> float:
        value = value.detach().double()
        value = value if value.shape[-2] >= value.shape[-1] else value.mT
        return spectral_norm(value.mT @ value - torch.eye(value.shape[-1]))

    ours = 'ours, msign(method="svd")'
    group = Group({ours: Contender(partial(msign, x, method="svd"), error)})
    for name, call in peers.orthonormal_weights(x).items():
        group.contenders[name] = Contender(call, error)
        group.rows.append(Row("orthonormal weight", shown(shape), ours, name))
    return group


def unit_norm(shape: tuple[int, int]) -> Group:
    """A Gaussian weight of norm 10 scaled to norm 1; the error is the distance of its norm from 1."""
    x = gaussian(*shape, norm=10.0).float()

    def error(value: Tensor) -> float:
        return abs(spectral_norm(value.detach()) - 1)

    group = Group({"ours": Contender(partial(spectral_normalize, x, 1.0), error)})
    for name, call in peers.unit_norm_weights(x).items():
        group.contenders[name] = Contender(call, error)
        group.rows.append(Row("spectral_normalize", shown(shape), "ours", name))
    return group
