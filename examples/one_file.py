"""Norm-based training in one file that needs torch alone: the steps of Muon and Scion, caps, and proofs.

A weight lives in a normed space. Choose its norm once, and four things follow: how it starts (`start`), how its
gradient becomes an update (`dualize`), how it is kept in bounds after every step (`cap`), and what is proved about it
(`proved`). Read this file first, or copy it to where no package may be imported. The library does the same for every
kind of layer, in batches, on many processes, and proves whole transformers.

    python examples/one_file.py

Sources: Muon (Jordan, 2024), Scion (Pethick et al., 2025, "Training Deep Learning Models with Norm-Constrained LMOs"),
"Modular Duality in Deep Learning" (Bernstein and Newhouse, 2024), "Fast, Numerically Stable, and Auto-Differentiable
Spectral Clipping" (Cesista, 2025), and the proof by Cholesky's factorisation of Rump (BIT, 2006).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
"""Muon's polynomial: it leaves singular values between 0.68 and 1.21, and is the cheapest."""
YOU = (
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # fmt: skip
"""J. You's polynomial, as the library's Scion has it: between 0.97 and 1.15."""
TARGET = 1 - 2e-5
"""Caps aim this much lower, so that rounding to float32 does not carry a weight above them."""
UNIT = 2.0**-53
"""The largest relative error of an operation in float64."""


# ------------------------------------------------------------------------------------------------ functions of a matrix


def msign(x: Tensor, steps: Iterable[tuple[float, float, float]]) -> Tensor:
    """Move every singular value of `x`, `(m, n)`, near to 1, by products alone: `U S V^T -> U V^T`, about."""
    if x.shape[0] < x.shape[1]:
        return msign(x.T, steps).T
    x = x / x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)  # squares of 1e-30 leave the range of float32
    x = x / torch.linalg.matrix_norm(x).clamp(min=0.5)  # only a matrix of zeros has a smaller norm
    for a, b, c in steps:
        gram = x.T @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x


def hard_cap(w: Tensor, cap: float) -> Tensor:
    """Replace every singular value of `w`, `(m, n)`, by the smaller of itself and the cap; the others stay."""
    u, s, vh = torch.linalg.svd(w.double(), full_matrices=False)
    excess = (s - cap).clamp(min=0)
    return w if not excess.any() else (w - (u * excess) @ vh).to(w.dtype)


def proved_singular_value(w: Tensor) -> float:
    """A number that is proved to be at least the largest singular value of `w`, `(m, n)`, whatever was rounded.

    If Cholesky's factorisation of `c I - W^T W` runs to its end in float64, no eigenvalue of `W^T W` exceeds c by more
    than `slack`, which counts every rounding of the product and of the factorisation with room to spare.
    """
    w = w.detach().double().cpu()
    largest = float(w.abs().max()) if w.numel() else 0.0
    if largest == 0:
        return 0.0
    if not math.isfinite(largest):
        raise ValueError("the matrix holds NaN or infinity, and has no norm; look for the step that made it")
    scale = 2.0 ** math.frexp(largest)[1]  # dividing by a power of two is exact
    w = (w if w.shape[0] >= w.shape[1] else w.T) / scale
    (m, n), gram = w.shape, w.T @ w
    estimate, margin = math.sqrt(max(float(torch.linalg.eigvalsh(gram)[-1]), 0.25)), 1e-10
    while True:
        bound = estimate * (1 + margin)
        slack = 4 * (m + n + 4) * UNIT * (n * bound * bound + float(gram.trace()))
        shifted = (bound * bound - slack) * torch.eye(n, dtype=torch.float64) - gram
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if not failed and factor.isfinite().all():
            return bound * scale
        margin *= 4


# ---------------------------------------------------------------------------------------------------------------- norms


class Spectral:
    """The RMS -> RMS operator norm of `(outputs, inputs)` matrices: the most that the RMS of a vector can grow."""

    def __init__(self, steps: Iterable[tuple[float, float, float]] = YOU) -> None:
        self.steps = tuple(steps)

    def unit(self, w: Tensor) -> float:
        """The largest singular value of a matrix of norm 1."""
        return math.sqrt(w.shape[0] / w.shape[1])

    def start(self, w: Tensor) -> Tensor:
        """A random matrix whose singular values are all 1 in units of the norm."""
        return nn.init.orthogonal_(torch.empty_like(w)) * self.unit(w)

    def dualize(self, gradient: Tensor) -> Tensor:
        """The direction of norm 1 along which the loss rises fastest to first order: Muon's step."""
        return msign(gradient, self.steps) * self.unit(gradient)

    def cap(self, w: Tensor, bound: float) -> Tensor:
        """The nearest matrix whose norm does not exceed the bound."""
        return hard_cap(w, bound * TARGET * self.unit(w))

    def proved(self, w: Tensor) -> float:
        """A number that is proved to be at least the norm."""
        return proved_singular_value(w) / self.unit(w) * (1 + 8 * UNIT)


class LargestRMS:
    """The largest RMS of a row: of a symbol's vector in a table of embeddings, or of a bias, which is one row."""

    inflation = 16.0
    """The most by which a rare symbol's gradient is enlarged over the largest one of the batch."""

    def start(self, w: Tensor) -> Tensor:
        """Random rows of RMS 1; a bias starts at zero."""
        return torch.zeros_like(w) if w.ndim == 1 else self.dualize(torch.randn_like(w))

    def dualize(self, gradient: Tensor) -> Tensor:
        """Every row divided by its RMS."""
        sizes = self._sizes(gradient)
        divisors = sizes.clamp(min=float(sizes.max()) / self.inflation)
        return gradient / divisors.clamp(min=torch.finfo(gradient.dtype).tiny)

    def cap(self, w: Tensor, bound: float) -> Tensor:
        """Rows that are longer than the bound are shortened to it."""
        return w * (bound * TARGET / self._sizes(w).clamp(min=bound * TARGET))

    def proved(self, w: Tensor) -> float:
        """A number that is proved to be at least the norm: a sum of n squares is right within n roundings."""
        return float(self._sizes(w.detach().double()).max()) * (1 + (w.shape[-1] + 8) * UNIT)

    def _sizes(self, w: Tensor) -> Tensor:
        largest = w.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
        return largest * (w / largest).square().mean(-1, keepdim=True).sqrt()


def norm_of(module: nn.Module, name: str) -> Spectral | LargestRMS:
    """The norm of a parameter of a layer: by what it maps, not by its shape."""
    return Spectral() if isinstance(module, nn.Linear) and name == "weight" else LargestRMS()


# ------------------------------------------------------------------------------------------------------------ optimizer


class Scion(torch.optim.Optimizer):
    """Every weight moves by the learning rate, in the direction that its own norm makes of its momentum.

    Groups are dictionaries with `params`, their `norm`, and optionally the `cap` that holds after every step, and
    `momentum` and `nesterov`. One learning rate serves all layers, since the norm of a step is its unit.
    """

    def __init__(self, groups: list[dict], lr: float, momentum: float = 0.9, nesterov: bool = False) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "norm": None, "cap": None})
        self.cap_()  # the start, too

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        """Move every parameter that has a gradient, and bring all back within their caps."""
        for group in self.param_groups:
            norm, kept = group["norm"], group["momentum"]
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 1 - kept)
                seen = average.lerp(p.grad, 1 - kept) if group["nesterov"] else average
                p.sub_(norm.dualize(seen), alpha=group["lr"])
        self.cap_()

    @torch.no_grad()
    def cap_(self) -> None:
        """Bring every weight back within its cap."""
        for group in self.param_groups:
            for p in group["params"] if group["cap"] is not None else ():
                p.copy_(group["norm"].cap(p, group["cap"]))


def scion_groups(model: nn.Module, cap: float | None = None) -> list[dict]:
    """One group for every parameter of `nn.Linear`, `nn.Embedding` and biases; the cap is for tables and matrices."""
    return [
        {"params": [p], "norm": norm_of(module, name), "cap": None if name == "bias" else cap}
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
    ]


def muon(hidden: list[Tensor], others: list[Tensor], lr: float, adamw_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, and AdamW for embeddings, the last layer and vectors."""
    groups = [{"params": hidden, "norm": Spectral(JORDAN)}]
    return [Scion(groups, lr, momentum=0.95, nesterov=True), torch.optim.AdamW(others, adamw_lr, weight_decay=0.0)]


# ------------------------------------------------------------------------------------------------------------ a network


def lipschitz(model: nn.Sequential) -> float:
    """A proved Lipschitz constant of linear layers and ReLUs in a row, from RMS to RMS: the product of their norms."""
    constant = 1.0
    for layer in model:
        if isinstance(layer, nn.Linear):
            constant = math.nextafter(constant * Spectral().proved(layer.weight), math.inf)
        elif not isinstance(layer, nn.ReLU):
            raise ValueError(f"{type(layer).__name__} has no bound here; use nn.Linear and nn.ReLU")
    return constant


def main(steps: int = 300) -> tuple[float, float]:
    """Fit a wave with every norm at most 1.5; return the last loss and the proved constant."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    with torch.no_grad():
        for module in model:
            for name, p in module.named_parameters():
                p.copy_(norm_of(module, name).start(p))
    optimizer, loss = Scion(scion_groups(model, cap=1.5), lr=0.05), torch.zeros(())
    for step in range(steps):
        x = torch.randn(256, 4)
        loss = nn.functional.mse_loss(model(x)[:, 0], x.sum(1).sin())
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / steps)
        optimizer.step()
    for name, p in model.named_parameters():
        print(f"{name}: norm at most {norm_of(model.get_submodule(name[0]), name[2:]).proved(p)}")
    print(f"loss {loss:.4f}, proved Lipschitz constant {lipschitz(model)}, at most {1.5**3} by the caps")
    return float(loss.detach()), lipschitz(model)


if __name__ == "__main__":
    main()
