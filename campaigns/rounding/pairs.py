"""Pairs of inputs within a certified radius, and settled predictions, whose executed predictions differ."""

import math
import warnings
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import wellnormed as wn
from campaigns.random_models.draw import Draw, Layer
from campaigns.rounding.cases import DTYPES, UNITS, autocast
from campaigns.rounding.executions import WAYS, execute
from wellnormed.certificates.certificate import Certificate
from wellnormed.program.errors import UncertifiableError

KINDS = ("linear", "MaxMin", "deep", "ReLU", "abs", "potential", "large bias", "offset")
FAR = 10.0
"""The largest distance of another prediction, in radii, that is searched."""
FORMS = ("float32", "bfloat16", "float16", "returned in bfloat16", "returned in float16", "autocast")


def classifier(number: int) -> tuple[str, str, nn.Module, Tensor, float]:
    """Kind, form, model, example, radius: maps with orthogonal weights, whose radii are nearly distances to a tie."""
    torch.manual_seed(number)
    draw = Draw(3, number)
    kind, form, n = KINDS[number % 8], FORMS[number // 8 % 6], draw.whole(2, 24)
    count = draw.whole(2, min(n, 6))
    layers: list[nn.Module] = []
    for _ in range({"linear": 0, "large bias": 0, "deep": 3}.get(kind, 1)):
        layers.append(wn.nn.ConvexPotential(n, n) if kind == "potential" else nn.Linear(n, n))
        after = {"ReLU": nn.ReLU(), "abs": Layer(lambda s, x: x.abs()), "offset": Layer(lambda s, x: (x + 100) - 100)}
        layers += [after.get(kind, wn.nn.MaxMin())] if kind != "potential" else []
    model = nn.Sequential(*layers, nn.Linear(n, count))
    for each in model.parameters():
        each.data = nn.init.orthogonal_(torch.empty_like(each)) if each.ndim == 2 else 0.1 * torch.randn_like(each)
    if kind == "large bias":
        model[-1].bias.data += 300.0  # type: ignore[union-attr]
    dtype = DTYPES.get(form, torch.float32)
    model = model.to(dtype).eval()
    if form.startswith("returned"):
        returned = DTYPES[form.split()[-1]]
        model = Layer(lambda s, x: s.inner(x).to(returned), inner=model)
    model = autocast(model) if form == "autocast" else model
    return kind, form, model, torch.zeros(1, n, dtype=dtype), draw.between(0.1, 100.0)


@dataclass
class Outcome:
    """The outcome of one classifier."""

    number: int
    kind: str
    form: str
    inputs: int = 0
    """Inputs with a radius."""
    least: float = FAR
    """The least distance of another prediction, in radii; it shows whether the search sees anything."""
    broken: list[str] = field(default_factory=list)
    status: str = "within"
    """Or `broken`."""


def pairs(number: int) -> Outcome:
    """Search for inputs within a certified radius that are executed with another largest logit; and settled ones."""
    kind, form, model, example, radius = classifier(number)
    outcome = Outcome(number, kind, form)
    with warnings.catch_warnings(), torch.no_grad(), suppress(UncertifiableError):
        warnings.simplefilter("ignore")
        certificate = wn.certify(model, example, radius, margins=form in DTYPES and number % 3 > 0)
        if certificate.forward_error is not None:
            x = _near_ties(model, radius, example)
            _compare_settled(outcome, model, certificate, x)
            _compare_within(outcome, model, certificate, x)
    outcome.status = "broken" if outcome.broken else "within"
    return outcome


def _near_ties(model: nn.Module, radius: float, example: Tensor) -> Tensor:
    """600 inputs of the domain, of which half lie near a tie."""
    noise = torch.randn(300, example.shape[1], dtype=torch.float64)
    shares = 0.98 * torch.rand(300, 1, dtype=torch.float64)
    x = radius * noise / noise.square().mean(-1, keepdim=True).sqrt() * shares
    first, low, high = model(x.to(example.dtype)).argmax(-1), x, x.roll(1, 0)
    for _ in range(30):
        middle = (low + high) / 2
        same = (model(middle.to(example.dtype)).argmax(-1) == first)[:, None]
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return torch.cat([x, low + (x - low) * torch.rand(300, 1, dtype=torch.float64) ** 4]).to(example.dtype)


def _compare_settled(outcome: Outcome, model: nn.Module, certificate: Certificate, x: Tensor) -> None:
    """Execute every fourth input in all ways."""
    logits = model(x)
    best, settled = logits.argmax(-1)[::4], certificate.settled(logits)[::4]
    for way in WAYS:
        if way not in ("compiled", "onnx", "of many"):
            with WAYS[way]():
                other = execute(model, x[::4], way, alone=True).argmax(-1)
            if bool(((other != best) & settled).any()):
                outcome.broken.append(f"settled, {way}")


def _compare_within(outcome: Outcome, model: nn.Module, certificate: Certificate, x: Tensor) -> None:
    """Move inputs towards a tie by shares of their radius, and execute them."""
    logits = model(x)
    best, radii = logits.argmax(-1), certificate.certified_radius(logits)
    x, best, radii = (each[radii > 0] for each in (x, best, radii))
    if not len(x):
        return
    outcome.inputs, towards = len(x), _towards_a_tie(certificate, x, best)
    for share in (0.9, 0.97, 0.99, 0.999, 1.0, 1.001, 1.01, 1.05, 1.2, 1.5, 2, 3, 5, 10):
        for size in (0, 1, 2):
            moved = x.double() + radii[:, None] * share * towards
            moved = (moved * (1 + size * UNITS[x.dtype] * torch.randn_like(moved))).to(x.dtype)
            distance = (moved.double() - x.double()).norm(dim=-1)
            inside = (moved.double().square().mean(-1).sqrt() <= float(certificate.input_domain)) & (distance > 0)
            other = inside & (execute(model, moved, "one by one", alone=size == 1).argmax(-1) != best)
            outcome.least = min([outcome.least, *(distance / radii)[other].tolist()])
    if outcome.least <= 1:
        outcome.broken.append("radius")


def _towards_a_tie(certificate: Certificate, x: Tensor, best: Tensor) -> Tensor:
    """The directions in which the two largest logits approach each other fastest."""
    with torch.enable_grad():
        given, module = x.double().requires_grad_(), certificate.program.double().module  # type: ignore[union-attr]
        y = torch.cat([module(one[None]) for one in given])
        rest = y.detach().scatter(1, best[:, None], -math.inf).argmax(-1)
        (slope,) = torch.autograd.grad((y.gather(1, rest[:, None]) - y.gather(1, best[:, None])).sum(), given)
    return slope / slope.norm(dim=-1, keepdim=True).clamp(min=1e-300)
