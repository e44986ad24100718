"""Small models that together use every primitive and every move."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wellnormed as wn
from wellnormed.constraints import Constraints, EntryCap
from wellnormed.models import GPTConfig, PotentialConfig
from wellnormed.models.gpt import GPT
from wellnormed.models.potential_gpt import PotentialGPT


class Function(nn.Module):
    """A function of a module and its input."""

    def __init__(self, function: Callable[..., Tensor], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, each in attributes.items():
            setattr(self, name, nn.Parameter(each) if isinstance(each, Tensor) else each)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def attention(self: Any, x: Tensor) -> Tensor:
    """Four heads of fused projections, queries in a ball that is idle, and a residual."""
    q, k, v = self.fused(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    q = q * torch.rsqrt((0.01 * q.square().mean(-1, keepdim=True)).clamp(min=1))
    return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)) + x


def rounded(self: Any, x: Tensor) -> Tensor:
    """Heads of fused projections that are rounded before attention, and a difference from what was rounded."""
    half = x.to(torch.bfloat16).float()
    q, k, v = self.fused(half).half().unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) + 0.5 * x - half


def moves(self: Any, x: Tensor) -> Tensor:
    """Sums of moved entries of one base, with constants."""
    turned = torch.cat([x[..., 3:] * 0.1, -x[..., :3]], -1)
    y = x + 0.3 * self.linear(x) - x.flip(-1) / 3 + turned
    return self.table * y[:, [2, 0, 0, 1]] + self.shift


def mixing(self: Any, x: Tensor) -> Tensor:
    """Averages of tokens by stored shares, of two sorts, and a product with the transposed input."""
    mixed = self.share @ self.linear(x)
    return (mixed @ x.mT) @ x + x.mean(1, keepdim=True)


def gates(self: Any, x: Tensor) -> Tensor:
    """Products, softmax and its logarithms, unit vectors, a maximum, and a ball that is not idle."""
    ball = x * torch.rsqrt((4.0 * x.square().mean(-1, keepdim=True)).clamp(min=1))
    small = F.softmax(x, -1) * x + F.log_softmax(x / 3, -1)
    small = torch.maximum(small.sort(-1)[0], x) + x.logsumexp(-1, keepdim=True)
    return small + F.normalize(x, dim=-1, eps=0.1) + ball


def network(self: Any, x: Tensor) -> Tensor:
    """Functions with slopes of both signs, a residual whose branch is scaled, and a table of factors."""
    y = F.gelu(self.first(x))
    y = y - 0.5 * self.down(F.leaky_relu(self.up(y), 0.2)) + self.shift
    return self.last(torch.tanh(y * self.scale))


def small(name: str) -> tuple[nn.Module, Tensor]:
    """A model of that name and an example, the same every time."""
    torch.manual_seed(0)
    linear = nn.Linear
    tokens, x = torch.randint(0, 65, (2, 6)), torch.randn(2, 4, 6)
    if name == "mlp":
        pair = nn.Sequential(linear(6, 8), nn.GELU(), linear(8, 3)), torch.randn(2, 6)
    elif name == "network":
        layers = {"first": linear(6, 5), "up": linear(5, 7), "down": linear(7, 5), "last": linear(5, 3)}
        tensors = {"scale": torch.rand(5), "shift": torch.randn(5)}
        pair = Function(network, **layers, **tensors), torch.randn(2, 4, 6)
    elif name == "attention":
        pair = Function(attention, fused=linear(16, 48, bias=False), output=linear(16, 16)), torch.randn(2, 3, 16)
    elif name == "attention with biases":
        pair = Function(attention, fused=linear(16, 48), output=linear(16, 16)), torch.randn(2, 3, 16)
    elif name == "rounded":
        pair = Function(rounded, fused=linear(16, 48, bias=False)), torch.randn(2, 3, 16)
    elif name == "gpt":
        pair = GPT(GPTConfig(width=16, blocks=1, length=6)), tokens
    elif name == "rotary gpt":
        pair = GPT(GPTConfig(width=16, blocks=1, length=6, rotary=True)), tokens
    elif name == "potential gpt":
        pair = PotentialGPT(PotentialConfig(length=6, hidden=32, blocks=1, mixing_heads=2)), tokens
    elif name == "encoder":
        pair = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True), torch.randn(2, 3, 16)
    elif name == "lstm":
        pair = Function(lambda self, x: self.cell(x)[0], cell=nn.LSTM(6, 4, batch_first=True)), x[:, :2]
    elif name == "gru":
        pair = Function(lambda self, x: self.cell(x)[0], cell=nn.GRU(6, 4, batch_first=True)), x[:, :2]
    elif name == "convolutions":
        first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2)]
        second = [nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2), nn.GroupNorm(2, 8), nn.AvgPool2d(2)]
        pair = nn.Sequential(*first, *second, nn.Flatten(), linear(8, 4)), torch.randn(2, 3, 9, 9)
    elif name == "transposed convolution":
        layers = [nn.Conv2d(3, 4, 2, stride=2), nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1)]
        pair = nn.Sequential(*layers), torch.randn(2, 3, 4, 4)
    elif name == "convolution of tokens":
        pair = Function(lambda self, x: self.conv(x.mT).mT, conv=nn.Conv1d(6, 4, 3, padding=1, groups=2)), x
    elif name == "moves":
        tensors = {"table": torch.randn(4, 1), "shift": torch.randn(4, 6)}
        pair = Function(moves, linear=linear(6, 6), **tensors), x
    elif name == "mixing":
        pair = Function(mixing, linear=linear(6, 6), share=torch.rand(4, 4)), x
    elif name == "within caps":
        layers = [linear(6, 8), nn.LayerNorm(8), linear(8, 3)]
        pair = Function(lambda self, x: self.layers(x + self.shift), layers=nn.Sequential(*layers), shift=x[0, 0]), x
    elif name == "gates":
        pair = Function(gates), torch.randn(2, 6)
    else:
        layers = [nn.ELU(), nn.SiLU(), nn.Mish(), nn.PReLU(), nn.Tanh(), nn.Sigmoid(), nn.Hardswish(), nn.Hardtanh()]
        pair = nn.Sequential(*layers, nn.LogSigmoid(), nn.SELU(), nn.GLU()), torch.randn(2, 6)
    with torch.no_grad():
        for parameter in pair[0].parameters():
            if not parameter.any():
                parameter.normal_()
    return pair


def constraints_of(name: str, model: nn.Module) -> Constraints | None:
    """What a model is certified within; None for its weights as they are."""
    if name != "within caps":
        return None
    optimizer = wn.Scion(wn.assign_norms(model, overrides={"shift": wn.norms.BiasRMS()}), lr=0.1)
    caps = {"layers.1.weight": EntryCap(10.0), "*.bias": wn.ColumnCap(10.0), "shift": wn.ColumnCap(10.0)}
    return wn.constrain(optimizer, {**caps, "*": wn.HardCap(10.0)})


NAMES = (
    "mlp", "attention", "attention with biases", "gpt", "rotary gpt", "potential gpt", "encoder", "lstm", "moves",
    "convolutions", "transposed convolution", "convolution of tokens", "mixing", "gates", "activations", "gru",
    "within caps", "rounded", "network",
)  # fmt: skip
