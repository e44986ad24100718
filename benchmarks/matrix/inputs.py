"""The matrices of the benchmarks: a published suite with known difficulties, and the shapes of GPT-2 small.

Every matrix has a seed, so that one case can be repeated alone. Caps are in spectral units.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SHAPES = ((256, 1024), (768, 768), (768, 3072), (3072, 768), (12, 256, 1024), (12, 768, 768))
"""Shapes that are timed."""
GPT2_LAYERS = 12
GPT2_LAYER = ((768, 768),) * 4 + ((768, 3072), (3072, 768))
"""Hidden matrices of one block of GPT-2 small: query, key, value, output, and the two of the feed-forward part."""
GPT2_TOKENS = 393_216
"""Tokens a step of the NanoGPT-140M run that Spectral clipping (SC) takes for its table of overheads."""

RATIOS = (1.01, 1.1, 1.5, 3.0, 10.0, 100.0, 1000.0)
SCALES = (-30, -15, 15, 30)


@dataclass(frozen=True)
class Case:
    """A matrix, and the cap it is measured with.

    Args:
        name: What is difficult about it.
        shape: `(m, n)`.
        make: The matrix in float64, from its shape; rounded to the dtype under test by the caller.
        cap: Upper bound in spectral units; where a function has a floor, it is 0.3 of it.
    """

    name: str
    shape: tuple[int, int]
    make: Callable[[int, int], Tensor]
    cap: float = 1.0


def gaussian(*shape: int, norm: float = 1.0, seed: int = 0) -> Tensor:
    """Independent normal entries, float64, every matrix scaled to the given spectral norm."""
    w = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    gram = w @ w.mT if shape[-2] < shape[-1] else w.mT @ w
    return w * (norm / torch.linalg.eigvalsh(gram)[..., -1:, None].sqrt())


def with_singular_values(values: Tensor, m: int, n: int, seed: int = 0) -> Tensor:
    """Random singular vectors and the given values, `min(m, n)` of them, float64."""
    generator = torch.Generator().manual_seed(seed)
    k = len(values)
    u, v = (torch.linalg.qr(torch.randn(d, k, dtype=torch.float64, generator=generator)).Q for d in (m, n))
    return (u * values.double()) @ v.mT


def of_rank_an_eighth(m: int, n: int) -> Tensor:
    """Exactly rank-deficient in every dtype: a product of matrices of -1, 0 and 1, scaled by a power of two."""
    generator = torch.Generator().manual_seed(0)
    rank = max(1, min(m, n) // 8)
    left, right = (torch.randint(-1, 2, size, generator=generator) for size in ((m, rank), (rank, n)))
    w = (left @ right).double()
    return w * 2.0 ** -(torch.linalg.matrix_norm(w, 2).log2().floor().item() - 1)


def _values(spectrum: Callable[[int], Tensor]) -> Callable[[int, int], Tensor]:
    return lambda m, n: with_singular_values(spectrum(min(m, n)), m, n)


def _flat(n: int) -> Tensor:
    return torch.full((n,), 3.0)


def _power_law(n: int) -> Tensor:
    return 3 / torch.arange(1, n + 1, dtype=torch.float64)


def _half_at_cap(n: int) -> Tensor:
    rest = n - n // 2
    return torch.cat((torch.ones(n // 2), torch.linspace(0.1, 2.0, rest)))


def _outlier(n: int) -> Tensor:
    return torch.cat((torch.tensor([30.0]), torch.linspace(0.5, 1.5, n - 1)))


def _clustered(n: int) -> Tensor:
    away = torch.logspace(-7, -2, n - n // 2, dtype=torch.float64)
    return torch.cat((1 + away, 1 - away[: n // 2]))


def _repeated(n: int) -> Tensor:
    return torch.tensor([2.0, 1.5, 1.0, 0.5]).repeat(n // 4 + 1)[:n]


SPECTRA: dict[str, Callable[[int, int], Tensor]] = {
    "Gaussian": lambda m, n: gaussian(m, n, norm=3.0),
    "flat": _values(_flat),
    "power law 1/i": _values(_power_law),
    "half at the cap": _values(_half_at_cap),
    "one outlier": _values(_outlier),
    "rank an eighth": of_rank_an_eighth,
    "clustered at the cap": _values(_clustered),
    "repeated values": _values(_repeated),
}


LARGE = (("Gaussian", (768, 768)), ("clustered at the cap", (768, 768)), ("half at the cap", (768, 3072)))
"""Cases at the size of GPT-2 small."""


def suite(small: tuple[int, int] = (96, 384), large: tuple[tuple[str, tuple[int, int]], ...] = LARGE) -> list[Case]:
    """The published suite: eight spectra, vectors, scales of 1e-30 to 1e30, largest values of 1.01 to 1000 caps.

    Args:
        small: Shape of most cases.
        large: Spectrum and shape of a few more.
    """
    m, n = small
    cases = [Case(name, small, make) for name, make in SPECTRA.items()]
    cases += [Case(name, (m, m), SPECTRA[name]) for name in ("Gaussian", "half at the cap", "clustered at the cap")]
    cases += [Case("row", (1, n), SPECTRA["Gaussian"]), Case("column", (n, 1), SPECTRA["Gaussian"])]
    for exponent in SCALES:
        scale = 10.0**exponent
        make = lambda m, n, scale=scale: gaussian(m, n, norm=3 * scale)  # noqa: E731
        cases.append(Case(f"scale 1e{exponent}", small, make, cap=scale))
    for ratio in RATIOS:
        cases.append(Case(f"largest {ratio:g} x cap", small, lambda m, n, r=ratio: gaussian(m, n, norm=r)))
    return cases + [Case(name, shape, SPECTRA[name]) for name, shape in large]


def shown(shape: tuple[int, ...]) -> str:
    """A shape as the table writes it."""
    return " x ".join(map(str, shape))
