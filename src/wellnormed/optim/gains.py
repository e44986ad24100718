"""The gains of linear layers as they are used while a model trains, beside the norms that bound them."""

import torch
from torch import Tensor, nn

from wellnormed.norms import Norm, Spectral
from wellnormed.norms.base import widened
from wellnormed.optim.conditional_gradient import ConditionalGradient


class Gains:
    """Watches how much of its norm every `nn.Linear` uses: the largest `RMS(dy) / RMS(dx)` since it was last read.

    `dx` is the difference of two inputs that stand side by side in a batch, as of neighbouring tokens, and `dy` that of
    their outputs. The norm of the weight bounds their ratio. Pass it to `scalars`, which reads it, as `gain/NAME` and
    `gain_over_norm/NAME`; a layer that was not called, or saw equal inputs alone, has no gain.

    Args:
        model: Whose layers are watched, by hooks, until `remove()`.
        optimizer: Says the norms; layers whose weight's norm is not in the unit "rms" are not watched.

    Example:
        >>> import torch, wellnormed as wn
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> _ = layer.weight.data.copy_(torch.diag(torch.tensor([1.0, 0.25])))
        >>> optimizer = wn.Scion(layer)
        >>> gains = Gains(layer, optimizer)
        >>> _ = layer(torch.tensor([[1.0, 1.0], [1.0, 3.0]]))  # they differ in the second entry alone
        >>> gains.read()
        {'weight': 0.25}
    """

    def __init__(self, model: nn.Module, optimizer: ConditionalGradient) -> None:
        names = {a.parameter: a.name for a in optimizer.assignment if _bounds_gains(a.norm)}
        self._largest: dict[str, Tensor] = {}
        self._hooks = [
            layer.register_forward_hook(
                lambda _, x, named, y, name=names[layer.weight]: self._see(name, (*x, *named.values())[0], y),
                with_kwargs=True,
            )
            for layer in model.modules()
            if isinstance(layer, nn.Linear) and layer.weight in names
        ]

    @torch.no_grad()
    @torch._disable_dynamo
    def _see(self, name: str, x: Tensor, y: Tensor) -> None:
        dx, dy = (widened(each.detach()).flatten(0, -2).diff(dim=0) for each in (x, y))
        inputs, outputs = (each.square().mean(-1).sqrt() for each in (dx, dy))
        if inputs.numel():
            gain = torch.where(inputs > 0, outputs / inputs, 0).amax().double()
            self._largest[name] = torch.maximum(gain, self._largest.get(name, gain))

    def read(self) -> dict[str, float]:
        """The largest gain of every layer since the last call, by the name of its weight."""
        names, gains = list(self._largest), list(self._largest.values())
        self._largest.clear()
        numbers = torch.stack([gain.to(gains[0].device) for gain in gains]).tolist() if gains else []  # one transfer
        return {name: gain for name, gain in zip(names, numbers, strict=True) if gain > 0}

    def remove(self) -> None:
        """End watching."""
        for hook in self._hooks:
            hook.remove()


def _bounds_gains(norm: Norm | None) -> bool:
    """Whether a norm of a matrix is the largest ratio of the RMS of a change of outputs and of inputs, or above it."""
    inner = getattr(norm, "inner", norm)
    return isinstance(inner, Spectral) and inner.units == "rms" and inner.input_axis == 1
