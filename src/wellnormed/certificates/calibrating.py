"""`calibrate`: set floors of norm layers and radii of ball projections by the sizes of activations on data."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wellnormed._inputs import require_module, require_numbers
from wellnormed._modes import evaluating
from wellnormed._ranges import POSITIVE
from wellnormed.nn.floored import FlooredNorm
from wellnormed.nn.projection import BallProjection
from wellnormed.program.program import arguments_of
from wellnormed.routing.tables import aligned, grouped


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` put into a model; `print` shows it."""

    floors: dict[str, float]
    """Name of a norm layer -> its floor."""
    radii: dict[str, float]
    """Name of a ball projection -> its radius."""
    hit_rates: dict[str, float]
    """Name of a norm layer or ball -> the share of the data's vectors below its floor, or outside its ball."""
    left: dict[str, str]
    """Name of a module that has an eps and got no floor -> the reason."""

    def __str__(self) -> str:
        rows = [("layer", "bound", "hit on the data")]
        for kind, bounds in (("floor", self.floors), ("radius", self.radii)):
            rows += [(name, f"{kind} {bound:.4g}", f"{self.hit_rates[name]:.2%}") for name, bound in bounds.items()]
        rows += [(name, "none", why) for _, (name, why) in grouped(self.left.items())]
        return aligned(rows)

    __repr__ = __str__


def calibrate(model: nn.Module, data: Iterable[Any], slack: float = 1.05) -> Calibration:
    """Put a floor under the scale of every norm layer, so that the model has a useful Lipschitz constant.

    A LayerNorm or RMSNorm stretches by up to `1 / sqrt(eps)`, 316 for an eps of 1e-5, and a stack of them by the
    product. But it does so only for tiny vectors, which do not occur on data. Each is therefore replaced by a
    `wellnormed.nn.FlooredNorm`, which stretches by at most `1 / floor`; the floor is the smallest RMS of a vector on
    the data, divided by `slack`. Every `wellnormed.nn.BallProjection` of the model gets the largest RMS times `slack`
    as its radius: put these where activations have no bound, as before attention without a norm layer. Floors and
    radii are part of the model, so `certify` and `constrain(lipschitz=...)` use them for all inputs, while results on
    the data hardly change.

    Vectors whose mean square is below the layer's eps, such as padding, do not set a floor, since the layer does not
    enlarge them to an RMS near 1 either. They count as below the floor.

    Only layers of exactly the classes `nn.LayerNorm`, `nn.RMSNorm` and `FlooredNorm` are replaced: a subclass may do
    more. The result lists the other modules with an eps and no buffers, and the reasons. Parameters, state dict and
    optimizers stay as they are. A floor or a radius is a setting like eps, and not in the state dict, which loads
    without it and without a word. Save `floors` and `radii` of the result too, as the example does, or the whole model.

    The model runs in evaluation mode, without gradients, and not compiled; modes are restored. Compiled models are
    compiled again at their next call.

    Args:
        model: Any module; changed in place.
        data: Batches of inputs, each in the form of a call: a tensor, a tuple of arguments, or a dictionary of
            keywords; or one batch, a tensor or a dictionary. A few hundred samples suffice.
        slack: Safety factor for other data. Below 1, floors and balls act on some of the data, and the constant is
            smaller.

    Returns:
        Floors, radii, the share of vectors that each acts on, and the modules that were left alone.

    Raises:
        ValueError: `slack` is not positive and finite, `data` is empty or reaches no norm layer and no ball projection,
            or several processes run.

    Example:
        >>> import wellnormed as wn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2))
        >>> before = wn.certify(model, torch.zeros(1, 8)).lipschitz
        >>> list(wn.calibrate(model, torch.randn(64, 8)).floors)
        ['1']
        >>> bool(wn.certify(model, torch.zeros(1, 8)).lipschitz < before / 30)
        True

        The same model in another process, calibrated on any data and then given the floors that were saved:

        >>> saved = model.state_dict(), wn.calibrate(model, torch.randn(64, 8)).floors
        >>> again = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2))
        >>> _ = again.load_state_dict(saved[0]), wn.calibrate(again, torch.ones(1, 8))
        >>> for name, floor in saved[1].items():
        ...     again.get_submodule(name).floor = floor  # of a ball projection: .radius
        >>> wn.certify(again, torch.zeros(1, 8)).lipschitz == wn.certify(model, torch.zeros(1, 8)).lipschitz
        True
    """
    require_module("calibrate", model)
    require_numbers("calibrate: ", {"slack": slack}, POSITIVE)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"calibrate: {dist.get_world_size()} processes would have floors of their own; calibrate before "
            "torch.distributed.init_process_group, on the same data in every process"
        )
    if _has_scale(model):
        raise ValueError(f"calibrate: the model is itself a {type(model).__name__}; pass nn.Sequential(model)")
    watched = [_Watched(name, module) for name, module in model.named_modules() if _has_scale(module)]
    with _watching(model, watched):
        example = _run(model, data)
    left = {each.name: why for each in watched if (why := each.why_not())}
    served = [each for each in watched if each.name not in left]
    if not served:
        what = "; ".join(f"{name} {why}" for _, (name, why) in grouped(left.items()))
        raise ValueError(
            "calibrate: the data reaches no LayerNorm, RMSNorm or BallProjection of this model "
            f"({what or 'no module has an eps'}); put nn.LayerNorm or nn.RMSNorm in the place of a class that computes "
            "the same, by model.set_submodule, or a wn.nn.FlooredNorm or wn.nn.BallProjection into the model"
        )
    bounds = {each: each.bound(slack) for each in served}
    floored = {each.module: each.floored(bound) for each, bound in bounds.items() if not each.is_ball}
    found = Calibration(
        floors={each.name: bound for each, bound in bounds.items() if not each.is_ball},
        radii={each.name: bound for each, bound in bounds.items() if each.is_ball},
        hit_rates={each.name: each.hit_rate(bound) for each, bound in bounds.items()},
        left=left,
    )
    places = [pair for pair in model.named_modules(remove_duplicate=False) if pair[1] in floored]
    for name, module in places:
        model.set_submodule(name, floored[module])
    try:
        _require_out_of_use(model, [each for each in served if not each.is_ball], example)
    except BaseException:
        for name, module in places:
            model.set_submodule(name, module)
        raise
    for each in served:
        if each.is_ball:
            each.module.radius = bounds[each]
    return found


_CENTRED: dict[type[nn.Module], bool] = {nn.LayerNorm: True, nn.RMSNorm: False, FlooredNorm: True}
"""Class of a norm layer -> whether it subtracts the mean; a `FlooredNorm` says so itself."""


class _Watched:
    """A ball projection, or a module that has an eps, and the RMS of each vector that the data brings to it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.reached, self.is_ball = name, False, isinstance(module, BallProjection)
        self.module: Any = module
        self.doubt = "" if self.is_ball else _doubt(module)
        """The reason why it is left alone, as far as its class tells; empty without one."""
        self.counted: list[Tensor] = []
        """The RMS of every vector that is not padding, one tensor for each call."""
        self.sizes: list[Tensor] = []
        """The RMS of every vector, after the mean is subtracted if the layer does so; one tensor for each call."""

    def see(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Record the sizes of the vectors in its input; registered as a forward pre-hook."""
        self.reached = True
        if self.doubt:
            return
        (x,) = (*arguments, *keywords.values())
        y, axes, eps = x.to(torch.promote_types(x.dtype, torch.float32)), (-1,), 0.0
        if not self.is_ball:
            axes, eps = tuple(range(-len(self.module.normalized_shape), 0)), self.module.eps
            y = y - y.mean(axes, keepdim=True) if self._is_centred() else y
        eps = torch.finfo(x.dtype).eps if eps is None else 0.0 if math.isnan(eps) else eps
        squares = y.square().mean(axes).flatten().cpu()
        if not bool(squares.isfinite().all()):
            raise ValueError(f"calibrate: {self.name} gets vectors that are not finite; pass finite data")
        self.sizes.append(squares.sqrt())
        self.counted.append(squares[squares > eps].sqrt())

    def why_not(self) -> str:
        """The reason why it gets no bound; empty if it gets one."""
        if not self.reached:
            return "is not reached"
        return self.doubt or ("" if torch.cat(self.counted).numel() else "gets only vectors near 0")

    def bound(self, slack: float) -> float:
        """The radius of a ball, or the floor of a norm layer."""
        counted = torch.cat(self.counted)
        return float(counted.max()) * slack if self.is_ball else float(counted.min()) / slack

    def floored(self, floor: float) -> FlooredNorm:
        """A layer with a floor, and with the parameters of this one."""
        old = self.module
        new = FlooredNorm(old.normalized_shape, floor, self._is_centred(), elementwise_affine=False)
        new.elementwise_affine, new.weight = old.elementwise_affine, old.weight
        new.register_parameter("bias", getattr(old, "bias", None))
        return new.train(old.training)

    def _is_centred(self) -> bool:
        return self.module.centred if isinstance(self.module, FlooredNorm) else _CENTRED[type(self.module)]

    def hit_rate(self, bound: float) -> float:
        """The share of vectors that the bound acts on."""
        sizes = torch.cat(self.sizes)
        return float((sizes > bound if self.is_ball else sizes < bound).double().mean())


def _has_scale(module: nn.Module) -> bool:
    """Whether it is a ball projection or has an eps; not with buffers, as batch norm, which divides by those."""
    if isinstance(module, BallProjection | nn.LayerNorm | nn.RMSNorm):
        return True
    composed = any(True for _ in module.buffers(recurse=False)) or any(True for _ in module.children())
    return not composed and any(re.search("(^|_)eps", name) for name in vars(module))


def _doubt(module: nn.Module) -> str:
    """The reason why a module is not replaced, since it may compute something else; empty without one."""
    if type(module) not in _CENTRED:
        return f"is of the class {type(module).__name__}, which may do more than nn.LayerNorm or nn.RMSNorm"
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return "has hooks, or a `forward` of its own"
    return ""


@contextmanager
def _watching(model: nn.Module, watched: list[_Watched]) -> Iterator[None]:
    """Record the inputs of the layers, with all ball projections and torch's fused encoder layers switched off.

    The model is in evaluation mode, and not compiled, since compiled code has no hooks.
    """
    handles = [each.module.register_forward_pre_hook(each.see, with_kwargs=True) for each in watched]
    radii = {each.module: each.module.radius for each in watched if isinstance(each.module, BallProjection)}
    for ball in radii:
        ball.radius = _NO_LIMIT
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which packs padded inputs, and calls no layers
    try:
        with torch.compiler.set_stance("force_eager"), evaluating(model):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for handle in handles:
            handle.remove()
        for ball, radius in radii.items():
            ball.radius = radius


def _require_out_of_use(model: nn.Module, old: list[_Watched], example: Any) -> None:
    """Refuse a model that calls replaced layers by other ways than their places, as from a list."""
    for each in old:
        each.reached = False
    with _watching(model, old):
        _run(model, [example])
    if held := [each.name for each in old if each.reached]:
        raise ValueError(
            f"calibrate: {', '.join(held)} would have a floor in vain, since the model calls it from elsewhere than "
            "its place, as from a list; hold it in an nn.ModuleList. Nothing was changed"
        )


_NO_LIMIT = 1e18
"""The largest power of ten whose square float32 holds."""


@torch.no_grad()
def _run(model: nn.Module, data: Iterable[Any]) -> Any:
    """Call the model with every batch, and return the last one."""
    if not isinstance(data, Iterable):
        raise ValueError(f"calibrate: data is of type {type(data).__name__}; pass a tensor, or batches of inputs")
    example = None
    for example in [data] if isinstance(data, Tensor | Mapping) else data:
        arguments, keywords = arguments_of(example)
        try:
            model(*arguments, **keywords)
        except (TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"calibrate: the model cannot be called with a batch of data ({error}); pass inputs of its shape and "
                "dtype alone, as [x for x, _ in loader]"
            ) from error
    if example is None:
        raise ValueError("calibrate: data is empty; pass inputs of the model")
    return example
