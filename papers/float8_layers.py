"""Linear layers whose products are of 8-bit floats, without any scale for a tensor or a block of one (LT section 4.4).

What makes this possible are proved ranges: no entry of an input or a weight leaves the format. `to_float8_` refuses a
layer for which that is not proved, and the layers themselves refuse what leaves it when they run, or make NaN of it.

Shape suffixes: N vectors, I inputs, O outputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wellnormed._inputs import require_module, require_numbers
from wellnormed.modular import modular_rule
from wellnormed.modular.layers import weight_and_bias
from wellnormed.nn.attention import HeadProjection
from wellnormed.routing.patterns import matches

Product = Literal["emulated", "scaled_mm"]
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""E4M3 for inputs and weights, E5M2 for gradients, which need range more than precision (Micikevicius et al., 2022)."""
_CAPABILITY = (8, 9)
"""The compute capability of the first CUDA devices that multiply 8-bit floats."""


class _Float8:
    """The common part of layers with 8-bit products: their settings, and the product."""

    layer: str
    product: Product
    gradient_scale: float

    def _set(self, layer: str, product: Product, gradient_scale: float) -> None:
        _require_settings(type(self).__name__, product, gradient_scale)
        self.layer, self.product, self.gradient_scale = layer, product, float(gradient_scale)

    def _multiply(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        if self.product == "scaled_mm":
            require_device(x.device, self.layer)
        x_NI = x.reshape(-1, x.shape[-1])
        y_NO = _product(x_NI, weight_OI, self.gradient_scale, self.product == "scaled_mm", self.layer)[0]
        return y_NO.unflatten(0, x.shape[:-1]) if x.ndim > 1 else y_NO[0]

    def _settings(self) -> str:
        return f"product={self.product!r}, gradient_scale={self.gradient_scale:g}"


class Float8Linear(_Float8, nn.Linear):
    """`x W^T + b` with x and W rounded to E4M3, and in the backward pass the gradient of the result to E5M2.

    No tensor has a scale of its own: an entry is rounded as it stands, and the largest that fits is 448 (57,344 for
    gradients). One that does not fit, or is not finite, is an error, never NaN and never 448 in silence: a `ValueError`
    on the CPU, a device-side assertion on CUDA, which waits for nothing. The sum of products and b stay in the dtype of
    the input, under autocast too. Gradients pass through the rounding as if it were not there (straight through), and
    the weight that is trained keeps its own dtype. Parameters and `state_dict` are those of `nn.Linear`.

    **Underflow** costs accuracy, not soundness: an entry of at most 2^-10 = 0.00098 becomes 0 in E4M3, and one of at
    most 2^-17 = 7.6e-6 in E5M2. A loss that is the mean over N tokens gives gradients of the size 1 / N, so that
    without a scale many vanish: with 384 tokens three in ten entries (`docs/low-precision.md`), against one in a
    hundred of the inputs and three of the weights. `gradient_scale=N` puts that right without a look at any tensor.

    **Certificates** belong to the model with `nn.Linear`. Rounding has steps, so no Lipschitz constant; `certify`
    refuses this layer by name. The ranges of the unrounded model decide which layers may be converted
    (`to_float8_`); what the rounding of earlier layers, or later training, adds to a range is caught when it runs.

    Args:
        in_features: I.
        out_features: O.
        bias: Whether to add a bias.
        layer: How errors name this layer.
        product: "emulated" rounds, and multiplies in the input's dtype, on any device. "scaled_mm" calls
            `torch._scaled_mm` with scales of 1 on a CUDA device of compute capability 8.9 or more; I, O and N must be
            multiples of 16, and the result is rounded to bfloat16. It has been run on CPUs alone, where torch has the
            same function.
        gradient_scale: Gradients are multiplied by it before they are rounded, and their products divided by it.

    Shape: `(*, I)` -> `(*, O)`.

    Example:
        >>> layer = Float8Linear(2, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 0.3]]))  # 0.3 becomes 0.3125
        >>> layer(torch.tensor([100.0, 1.0])).tolist()  # 100 becomes 96
        [96.3125]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        layer: str = "linear",
        product: Product = "emulated",
        gradient_scale: float = 1.0,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self._set(layer, product, gradient_scale)

    def forward(self, input: Tensor) -> Tensor:
        result = self._multiply(input, self.weight)
        return result if self.bias is None else result + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._settings()}"


class Float8HeadProjection(_Float8, HeadProjection):
    """`HeadProjection` with the product of `Float8Linear`: queries, keys or values, `(B, T, D) -> (B, H, T, K)`."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        layer: str = "projection",
        product: Product = "emulated",
        gradient_scale: float = 1.0,
    ) -> None:
        super().__init__(width, heads)
        self._set(layer, product, gradient_scale)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._multiply(x_BTD, self.weight).unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._settings()}"


_FLOAT8: dict[type[nn.Module], type[_Float8]] = {nn.Linear: Float8Linear, HeadProjection: Float8HeadProjection}


def to_float8_(
    model: nn.Module,
    largest_inputs: Mapping[str, float],
    layers: Sequence[str] = ("*",),
    *,
    product: Product = "emulated",
    gradient_scale: float = 1.0,
) -> list[str]:
    """Turn layers of a model into layers with 8-bit products, in place, if proved ranges say that all fits.

    Nothing is changed unless every chosen layer fits. Parameters stay the same objects, so that an optimizer,
    constraints and `state_dict` know no difference.

    Args:
        model: Whose `nn.Linear`s and `wellnormed.nn.HeadProjection`s are meant; subclasses of them are left.
        largest_inputs: Name of a layer -> the proved largest absolute value of an entry of its input, which
            `wellnormed.certificates.number_formats(certificate).inputs` has.
        layers: `fnmatch` patterns of names of layers, or of modules above them. LT convert those of attention and
            feed-forward layers, and not the head.
        product: See `Float8Linear`; "scaled_mm" must be asked for.
        gradient_scale: See `Float8Linear`: the number of tokens in a batch, for a loss that is the mean over them.

    Returns:
        The names of the layers that were turned.

    Raises:
        ValueError: A chosen layer has no proved range, or its input or weight has one that E4M3 does not hold: names
            the layer, the range and the format. Or a pattern means no layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> to_float8_(model, {"0": 2.0, "2": 11.0}, ["2"])
        ['2']
    """
    require_module("to_float8_", model)
    _require_settings("to_float8_", product, gradient_scale)
    if not isinstance(largest_inputs, Mapping):
        raise ValueError(
            f"to_float8_: largest_inputs is of type {type(largest_inputs).__name__}; pass name -> largest entry, such "
            "as `wellnormed.certificates.number_formats(certificate).inputs`"
        )
    found = {name: module for name, module in model.named_modules() if type(module) in _FLOAT8}
    for pattern in layers:
        if not any(matches(pattern, name) for name in found):
            kinds = " or ".join(kind.__name__ for kind in _FLOAT8)
            raise ValueError(f"to_float8_: {pattern!r} means no {kinds}; the model has {', '.join(found) or 'none'}")
    chosen = {name: module for name, module in found.items() if any(matches(pattern, name) for pattern in layers)}
    largest = torch.finfo(FORWARD).max
    for name, module in chosen.items():
        if name not in largest_inputs:
            raise ValueError(
                f"to_float8_: nothing is proved of the input of {name}; leave the layer out, or pass the largest entry "
                f"in largest_inputs, which has {', '.join(largest_inputs) or 'none'}"
            )
        ranges = {"input": float(largest_inputs[name]), "weight": float(_weight(module).detach().abs().max())}
        for what, size in ranges.items():
            if not size <= largest:
                raise ValueError(
                    f"to_float8_: the {what} of {name} has entries of up to {size:.6g}, but E4M3 ends at {largest:g}; "
                    "constrain the weights, put a BallProjection before the layer, or leave it out of `layers`"
                )
    for name, module in chosen.items():
        module.__class__ = _FLOAT8[type(module)]  # type: ignore[assignment]
        module._set(name, product, gradient_scale)  # type: ignore[operator]
    return list(chosen)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)  # both kinds of layer have one
    return weight


def _require_settings(where: str, product: Product, gradient_scale: float) -> None:
    require_numbers(f"{where}: ", {"gradient_scale": gradient_scale})
    if not 0 < gradient_scale < float("inf"):
        raise ValueError(f"{where}: gradient_scale={gradient_scale} must be positive and finite; 1 is no scale")
    if product not in get_args(Product):
        raise ValueError(f"{where}: product={product!r} must be one of {', '.join(get_args(Product))}")


def require_device(device: torch.device, layer: str) -> None:
    """Refuse a device that does not multiply 8-bit floats."""
    where = f"{layer}: product='scaled_mm' needs a CUDA device of compute capability 8.9 or more"
    if device.type != "cuda":
        raise ValueError(f"{where}, and its input is on {device}; use product='emulated'")
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        raise ValueError(f"{where}; this one has {found[0]}.{found[1]}. Use product='emulated'")


def _rounded(x: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """A tensor in a float8 dtype. An entry that does not fit is an error; releases of torch make 448 or NaN of it.

    On a GPU and among many processes it becomes NaN: an error would wait for the device, or leave the other processes
    waiting, and a loss or gradient that is not finite stops training on all of them.
    """
    largest = torch.finfo(dtype).max
    if x.device.type == "cuda" or dist.is_initialized():
        return x.where(x.abs() <= largest, torch.nan).to(dtype)
    size = float(x.abs().amax()) if x.numel() else 0.0
    if not size <= largest:  # also NaN
        raise ValueError(
            f"{what} has entries that {str(dtype).removeprefix('torch.')} does not hold, which ends at {largest:g}: up "
            f"to {size:.6g}; constrain what it is made of, or keep nn.Linear here"
        )
    return x.to(dtype)


def _times(a: Tensor, b: Tensor, dtype: torch.dtype, scale: float, scaled_mm: bool) -> Tensor:
    """`a b / scale` of float8 matrices, added up in float32 or wider."""
    if not scaled_mm:
        result = a.to(dtype) @ b.to(dtype)
        return result if scale == 1 else result / scale
    unit = torch.ones((), dtype=torch.float32, device=a.device)
    columns = b.t().contiguous().t()  # the kernel wants the second factor stored by columns
    out = torch._scaled_mm(a.contiguous(), columns, unit / scale, unit, out_dtype=torch.bfloat16, use_fast_accum=False)
    return out.to(dtype)


# An operation of its own: one name for `certify` to refuse, and nothing for torch.compile to look into.
@torch.library.custom_op("wellnormed::float8_product", mutates_args=())
def _product(
    x_NI: Tensor, weight_OI: Tensor, gradient_scale: float, scaled_mm: bool, layer: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The product `(N, O)`, and both factors in float8."""
    x8, weight8 = _rounded(x_NI, FORWARD, f"{layer}: the input"), _rounded(weight_OI, FORWARD, f"{layer}: the weight")
    return _times(x8, weight8.t(), x_NI.dtype, 1.0, scaled_mm), x8, weight8


@_product.register_fake
def _(
    x_NI: Tensor, weight_OI: Tensor, gradient_scale: float, scaled_mm: bool, layer: str
) -> tuple[Tensor, Tensor, Tensor]:
    y_NO = x_NI.new_empty(x_NI.shape[0], weight_OI.shape[0])
    return y_NO, torch.empty_like(x_NI, dtype=FORWARD), torch.empty_like(weight_OI, dtype=FORWARD)


@torch.library.custom_op("wellnormed::float8_gradients", mutates_args=())
def _gradients(
    gradient_NO: Tensor, x8: Tensor, weight8: Tensor, gradient_scale: float, scaled_mm: bool, layer: str
) -> tuple[Tensor, Tensor]:
    """Gradients `(N, I)` and `(O, I)`."""
    scaled = gradient_NO if gradient_scale == 1 else gradient_NO * gradient_scale
    gradient8 = _rounded(scaled, BACKWARD, f"{layer}: the gradient of the result, times {gradient_scale:g},")
    dtype = gradient_NO.dtype
    of_input = _times(gradient8, weight8, dtype, gradient_scale, scaled_mm)
    return of_input, _times(gradient8.t(), x8, dtype, gradient_scale, scaled_mm)


@_gradients.register_fake
def _(
    gradient_NO: Tensor, x8: Tensor, weight8: Tensor, gradient_scale: float, scaled_mm: bool, layer: str
) -> tuple[Tensor, Tensor]:
    return gradient_NO.new_empty(x8.shape), gradient_NO.new_empty(weight8.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, weight, *settings = inputs
    ctx.save_for_backward(*output[1:])
    ctx.settings, ctx.dtype = settings, weight.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *of_factors: None) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 5
    of_input, of_weight = _gradients(gradient, *ctx.saved_tensors, *ctx.settings)
    return of_input, of_weight.to(ctx.dtype), None, None, None


_product.register_autograd(_backward, setup_context=_setup)


modular_rule(Float8Linear, Float8HeadProjection)(weight_and_bias)
