"""`calibrate`: give the norm layers of a model floors, and its balls radii, by the sizes of activations on data."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed._inputs import require_module, require_numbers
from wellnormed._modes import evaluating
from wellnormed._ranges import POSITIVE
from wellnormed.nn.floored import FlooredNorm
from wellnormed.nn.projection import BallProjection
from wellnormed.program.program import arguments_of
from wellnormed.routing.tables import aligned, grouped

T = TypeVar("T")


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` put into a model; `print` shows it."""

    floors: dict[str, float]
    """Name of a norm layer -> its floor."""
    radii: dict[str, float]
    """Name of a ball projection -> its radius."""
    hit_rates: dict[str, float]
    """Name of either -> the share of the data's vectors below the floor, or outside of the ball."""
    left: dict[str, str]
    """Name of a module that has an eps and got no floor -> why."""
    losses: tuple[float, float] | None
    """The mean loss over the data before and after; None without a loss."""

    def __str__(self) -> str:
        rows = [("layer", "bound", "hit on the data")]
        for kind, bounds in (("floor", self.floors), ("radius", self.radii)):
            rows += [(name, f"{kind} {bound:.4g}", f"{self.hit_rates[name]:.2%}") for name, bound in bounds.items()]
        rows += [(name, "none", why) for _, (name, why) in grouped(self.left.items())]
        words = [] if self.losses is None else ["loss on the data {:.6g} -> {:.6g}".format(*self.losses)]
        return "\n".join([aligned(rows), *words])

    __repr__ = __str__


def calibrate(
    model: nn.Module,
    data: Iterable[Any],
    slack: float = 1.05,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Calibration:
    """Put a floor under the scale of every norm layer, so that the model has a useful Lipschitz constant.

    A LayerNorm or RMSNorm stretches by up to `1 / sqrt(eps)`, 316 for an eps of 1e-5, and a stack of them by the
    product; vectors so small do not occur on data. So each becomes a `wellnormed.nn.FlooredNorm`, which stretches by
    at most `1 / floor`, with the least RMS of a vector on the data over `slack` as its floor. What a model has of
    `wellnormed.nn.BallProjection` gets the largest RMS times `slack` as its radius: put these where activations have no
    bound, as before attention without a norm layer. Both are part of the model, so that `certify` and
    `constrain(lipschitz=...)` prove for all inputs, and on the data hardly anything changes.

    Vectors whose mean square is below the layer's own eps, as of padding, do not set a floor, since the layer does not
    enlarge them to an RMS near 1 either. They count as below it.

    A norm layer is a module with an attribute such as `eps` or `variance_epsilon`, at most a `weight` and a `bias`, and
    the results of `F.layer_norm` or `F.rms_norm` over its last axes; so RMSNorms of one's own are served. The
    object becomes one of the other class in its place, wherever that is shared: code, parameters, state dict and
    optimizers stay as they are. A floor or a radius is a setting like eps, and no part of the state dict. To rebuild
    a model, calibrate on the same data before its weights change, or save it whole.

    The model runs in evaluation mode, without gradients, and not compiled; modes are put back. What `torch.compile` has
    made is compiled again when it runs. Where `torch.distributed` is initialized, every process calls this with data of
    its own, and all count the data of all.

    Args:
        model: Any module; changed in place.
        data: Batches of inputs, each what the model is called with: a tensor, a tuple of arguments, a dictionary of
            keywords. With `loss`, pairs `(input, target)`, as loaders have them. All are held in memory, and run once,
            with a loss twice; some hundred samples do.
        slack: The room for other data, as a factor. Below 1, floors and balls act on some of the data, and the constant
            is smaller.
        loss: `loss(result, target)`, whose mean over batches is reported before and after.

    Returns:
        Floors, radii, the share of vectors that each acts on, what was left alone, and the losses.

    Raises:
        ValueError: `slack` is not positive and finite, there is no data, or it reaches no norm layer and no ball.

    Example:
        >>> import wellnormed as wn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2))
        >>> before = wn.certify(model, torch.zeros(1, 8)).lipschitz
        >>> list(wn.calibrate(model, torch.randn(4, 64, 8)).floors)
        ['1']
        >>> bool(wn.certify(model, torch.zeros(1, 8)).lipschitz < before / 30)
        True
    """
    require_module("calibrate", model)
    require_numbers("calibrate: ", {"slack": slack}, POSITIVE)
    pairs = [(each, None) if loss is None else _pair(each) for each in data]
    if not pairs:
        raise ValueError("calibrate: data is empty; pass inputs of the model")
    watched = [_Watched(name, module) for name, module in model.named_modules() if _is_watched(module)]
    with torch.compiler.set_stance("force_eager"), evaluating(model):  # compiled code would pass by the hooks
        with _watching(watched):
            before = _mean_loss(model, pairs, loss)
        _share(watched)
        left = {each.name: why for each in watched if (why := each.why_not())}
        served = [each for each in watched if each.name not in left]
        if not served:
            what = "; ".join(f"{name} {why}" for _, (name, why) in grouped(left.items())) or "no module has an eps"
            raise ValueError(
                f"calibrate: the data reaches no LayerNorm, RMSNorm or BallProjection of this model ({what}); put a "
                "wn.nn.FlooredNorm into it in the place of a norm layer, or a wn.nn.BallProjection"
            )
        bounds = {each: each.bound(slack) for each in served}
        after = before if loss is None else _mean_loss(model, pairs, loss)
    return Calibration(
        floors={each.name: bound for each, bound in bounds.items() if not each.is_ball},
        radii={each.name: bound for each, bound in bounds.items() if each.is_ball},
        hit_rates={each.name: each.hit_rate(bound) for each, bound in bounds.items()},
        left=left,
        losses=None if loss is None else (before, after),
    )


class _Watched:
    """A ball projection, or a module that has an eps, and the RMS of each vector that the data brings to it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.is_ball, self.reached = isinstance(module, BallProjection), False
        self.eps = 0.0
        self.shape: tuple[int, ...] = ()
        self.centred: bool | None = None
        self.sizes: list[Tensor] = []
        """The RMS of every vector, without its mean if the layer subtracts it, for each call."""

    def see(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        """Take down what it is called with: a forward hook."""
        self.reached, (x, *others) = True, (*arguments, *keywords.values())
        if not self.sizes and not others and isinstance(x, Tensor) and x.is_floating_point():
            self.eps, self.shape, self.centred = _formula(module, x)
        if self.centred is None:
            return
        axes, y = tuple(range(-len(self.shape), 0)), x.to(torch.promote_types(x.dtype, torch.float32))
        y = y - y.mean(axes, keepdim=True) if self.centred else y
        self.sizes.append(y.square().mean(axes).sqrt().flatten().cpu())

    def why_not(self) -> str:
        """Why it gets no bound; empty if it gets one."""
        if not self.reached:
            return "is not reached"
        if self.centred is None:
            return "is no LayerNorm or RMSNorm over its last axes"
        return "" if self._counted().numel() else "gets only vectors near 0"

    def _counted(self) -> Tensor:
        sizes = torch.cat(self.sizes)
        return sizes[sizes.square() > self.eps]

    def bound(self, slack: float) -> float:
        """Give a ball its radius; make a norm layer a `FlooredNorm`, as which it keeps its parameters."""
        if isinstance(self.module, BallProjection):
            self.module.radius = float(self._counted().max()) * slack
            return self.module.radius
        floor = float(self._counted().min()) / slack
        for name in ("weight", "bias"):
            if not isinstance(getattr(self.module, name, None), Tensor):
                vars(self.module).pop(name, None)
                self.module._parameters[name] = None
        self.module.__class__ = FlooredNorm
        settings = {"floor": floor, "centred": self.centred, "normalized_shape": self.shape, "eps": math.nan}
        vars(self.module).update(settings, elementwise_affine=self.module.weight is not None)
        return floor

    def hit_rate(self, bound: float) -> float:
        """The share of vectors that the bound acts on."""
        sizes = torch.cat(self.sizes)
        return float((sizes > bound if self.is_ball else sizes < bound).double().mean())


def _share(watched: Sequence[_Watched]) -> None:
    """Let every process count what the data of all brought to each layer."""
    own = [(each.reached, each.eps, each.shape, each.centred, each.sizes) for each in watched]
    for each, seen in zip(watched, zip(*_everywhere(own), strict=True), strict=True):
        _, each.eps, each.shape, each.centred, _ = max(seen, key=lambda of_one: len(of_one[-1]))
        each.reached = any(of_one[0] for of_one in seen)
        each.sizes = [size for of_one in seen for size in of_one[-1]]


def _everywhere(own: T) -> list[T]:
    """The same from every process, in their order."""
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _is_watched(module: nn.Module) -> bool:
    """Whether it is a ball, or may be a norm layer. Batch norm only multiplies by constants in evaluation mode."""
    constants = getattr(module, "running_mean", None) is not None or any(module.children())
    return isinstance(module, BallProjection) or (not constants and bool(_eps_of(module)))


def _eps_of(module: nn.Module) -> list[float | None]:
    """The attribute that is called eps, or the like, in a list; empty if there is none."""
    named = (value for name, value in vars(module).items() if re.search("(^|_)eps", name))
    return [value for value in named if value is None or isinstance(value, float)][:1]


def _formula(module: nn.Module, x: Tensor) -> tuple[float, tuple[int, ...], bool | None]:
    """Its eps, the sizes of the axes that it normalizes, and whether it subtracts the mean: None if it does neither.

    It is known by its results for random numbers, not by its class.
    """
    if isinstance(module, FlooredNorm):
        return 0.0, tuple(module.normalized_shape), module.centred
    if isinstance(module, BallProjection):
        return 0.0, tuple(x.shape[-1:]), False
    weight, bias = (each if isinstance(each := getattr(module, n, None), Tensor) else None for n in ("weight", "bias"))
    shape = tuple(getattr(module, "normalized_shape", x.shape[-1:]) if weight is None else weight.shape)
    (stated,) = _eps_of(module)
    eps = torch.finfo(x.dtype).eps if stated is None else stated
    if x.shape[x.ndim - len(shape) :] != shape:
        return eps, shape, None
    probe = 1 + torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    result, near = module.forward(probe), torch.finfo(x.dtype).eps ** 0.5
    for centred, normal in ((True, F.layer_norm(probe, shape, eps=eps)), (False, F.rms_norm(probe, shape, eps=eps))):
        normal = normal if weight is None else normal * weight
        normal = normal if bias is None else normal + bias
        if result.shape == x.shape and torch.allclose(result, normal.to(result), rtol=near, atol=near):
            return eps, shape, centred
    return eps, shape, None


@contextmanager
def _watching(watched: list[_Watched]) -> Iterator[None]:
    """See what the layers are called with, while no ball acts."""
    handles = [each.module.register_forward_hook(each.see, with_kwargs=True) for each in watched]
    radii = {each.module: each.module.radius for each in watched if isinstance(each.module, BallProjection)}
    for ball in radii:
        ball.radius = _NO_LIMIT
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for ball, radius in radii.items():
            ball.radius = radius


_NO_LIMIT = 1e18
"""The largest power of ten whose square float32 holds."""


def _pair(each: Any) -> tuple[Any, Any]:
    """An input and its target."""
    if not isinstance(each, tuple | list) or len(each) != 2:
        raise ValueError(f"calibrate: with loss=, data must be pairs (input, target), got {type(each).__name__}")
    return each[0], each[1]


def _mean_loss(model: nn.Module, pairs: list[tuple[Any, Any]], loss: Callable[[Any, Any], Tensor] | None) -> float:
    """Run the data; the mean of the losses of all processes, 0 without a loss."""
    total = 0.0
    with torch.no_grad():
        for example, target in pairs:
            arguments, keywords = arguments_of(example)
            try:
                result = model(*arguments, **keywords)
            except TypeError as error:
                raise ValueError(
                    f"calibrate: the model cannot be called with a batch of data ({error}); pass inputs alone, as "
                    "[x for x, _ in loader], or pairs (input, target) with loss="
                ) from error
            total += float(loss(result, target)) if loss is not None else 0.0
    return fmean(_everywhere(total / len(pairs)))
