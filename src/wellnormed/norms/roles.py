"""What a parameter does in its layer: read off the layer's type, never guessed from a shape alone.

A recipe (`recipes`) then gives every role a norm. What has no role here has no norm, which
is an error of `assign_norms`.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

Kind = Literal["embedding", "one-hot columns", "matrix", "fused", "convolution", "gain", "vector"]

_GAINED = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_GATES = {"LSTM": 4, "GRU": 3}
_GAIN_NAMES = ("weight", "gain", "gamma", "scale")


@dataclass(frozen=True)
class Role:
    """What a parameter does, in words too.

    Args:
        kind: What it does.
        layer: The layer, as the table of an assignment names it.
        parts: Of a fused weight, how many equal parts lie along its first dimension.
        groups: Of a convolution.
        transposed: Whether a convolution is, or a matrix is stored with its inputs first.
        position: Whether its layer is the model's first or last, by order of registration.
    """

    kind: Kind
    layer: str
    parts: int = 1
    groups: int = 1
    transposed: bool = False
    position: Literal["first", "last", "both", ""] = ""


class Roles:
    """The roles of a model's parameters.

    The last layer is the last `nn.Linear`, the first one the first `nn.Linear` or convolution, in the order in which
    modules were registered (that of `named_modules`), frozen ones included, low-rank adapters not. A model that
    registers its head before its body needs overrides; the printed assignment says what was taken.

    Args:
        model: Any module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.owners = dict(model.named_modules(remove_duplicate=False))
        layers = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | _ConvNd) and not _adapter(name)
        ]
        self._first = layers[0][1] if layers else None
        self._last = next((module for _, module in reversed(layers) if isinstance(module, nn.Linear)), None)

    def layer_of(self, name: str) -> tuple[nn.Module, str]:
        """The layer that a parameter belongs to, and its name there; a parametrized one belongs to the layer it serves.

        Raises:
            ValueError: A parametrization with several originals, of which none is the layer's weight.
        """
        module_name, _, leaf = name.rpartition(".")
        module = self.owners[module_name]
        if isinstance(module, ParametrizationList) and (leaf == "original" or leaf.startswith("original")):
            layer_name, _, served = module_name.rpartition("parametrizations.")
            if leaf != "original":
                raise ValueError(
                    f"parameter {name!r} is one of several that a parametrization makes {served!r} of, so it has no "
                    "norm of its own; pass overrides for each of them, or remove the parametrization "
                    "(torch.nn.utils.parametrize.remove_parametrizations)"
                )
            return self.owners[layer_name.removesuffix(".")], served
        return module, leaf

    def role(self, name: str, ndim: int) -> Role | None:
        """The role of a parameter of `ndim` dimensions; None if nothing here knows it."""
        module, leaf = self.layer_of(name)
        found = _adapter_role(name, ndim) or _by_layer(module, leaf) or _by_shape(module, leaf, ndim)
        if found is None or leaf != "weight" or found.kind not in ("matrix", "convolution"):
            return found
        first, last = module is self._first, module is self._last
        return Role(
            found.kind,
            found.layer,
            groups=found.groups,
            transposed=found.transposed,
            position="both" if first and last else "first" if first else "last" if last else "",
        )


def _adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _adapter_role(name: str, ndim: int) -> Role | None:
    """Low-rank adapters as `peft` and `loralib` name them; each factor is a matrix like any other."""
    if ndim != 2 or not _adapter(name):
        return None
    if "lora_embedding_A" in name.split("."):
        return Role("one-hot columns", "LoRA factor of an embedding")
    return Role("matrix", "LoRA factor")


def _by_layer(module: nn.Module, leaf: str) -> Role | None:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and leaf == "weight":
        return Role("embedding", "nn.Embedding")
    if isinstance(module, nn.Linear) and leaf == "weight":
        return Role("matrix", "nn.Linear")
    if isinstance(module, _ConvNd) and leaf == "weight":
        kind = "ConvTranspose" if module.transposed else "Conv"
        layer = f"nn.{kind}{len(module.kernel_size)}d"
        return Role("convolution", layer, groups=module.groups, transposed=module.transposed)
    if isinstance(module, nn.MultiheadAttention):
        return _in_attention(leaf)
    if _full_name(module) == "transformers.pytorch_utils.Conv1D" and leaf == "weight":
        return Role("matrix", "Conv1D of transformers", transposed=True)
    if isinstance(module, nn.RNNBase):
        layer = f"nn.{module.mode.partition('_')[0]}"
        if leaf.startswith("bias"):
            return Role("vector", layer)
        return Role("matrix", layer) if leaf.startswith("weight_hr") else _fused(layer, _GATES.get(module.mode, 1))
    if isinstance(module, _GAINED) and leaf in ("weight", "bias"):
        return Role(
            "gain" if leaf == "weight" else "vector", f"{'gain' if leaf == 'weight' else 'bias'} of a norm layer"
        )
    return None


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _in_attention(leaf: str) -> Role | None:
    layer = "nn.MultiheadAttention"
    if leaf == "in_proj_weight":
        return _fused(f"{layer}: queries, keys, values", 3)
    if leaf in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        return Role("matrix", layer)
    return Role("vector", layer) if leaf in ("in_proj_bias", "bias_k", "bias_v") else None


def _fused(layer: str, parts: int) -> Role:
    return Role("fused", layer, parts=parts) if parts > 1 else Role("matrix", layer)


def _by_shape(module: nn.Module, leaf: str, ndim: int) -> Role | None:
    """Vectors and numbers; a norm layer of another library is known by its class's name."""
    kind = type(module).__name__
    if ndim == 0:
        return Role("gain", "one number")
    if ndim == 1 and leaf in _GAIN_NAMES and "norm" in kind.lower():
        return Role("gain", f"gain of {kind}, by its name")
    if ndim == 1 and isinstance(module, nn.PReLU):
        return Role("gain", "nn.PReLU")
    return Role("vector", "vector") if ndim == 1 else None
