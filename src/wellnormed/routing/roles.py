"""The role of a parameter in its layer, by the layer's type, or else by the parameter's name.

A recipe (`recipes`) then gives every role a norm. A parameter without a role has no norm, which is an error of
`assign_norms`. If a role is uncertain, `assign_norms` warns and names the parameter.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList

from wellnormed.routing.attributes import attention_heads
from wellnormed.routing.fused import experts, projection
from wellnormed.routing.patterns import unwrapped
from wellnormed.routing.places import is_original

Kind = Literal["embedding", "one-hot columns", "matrix", "experts", "convolution", "gain", "vector", "attention bias"]

_GATES = {"LSTM": 4, "GRU": 3}
_GAIN_NAMES = ("weight", "gain", "gamma", "scale")
_LAYER_SCALE = re.compile(r"layer_?scale|^gamma(_\d)?$")
_TOKENS = re.compile(
    r"((token|(^|_)pos(ition(al)?)?_?(emb|embed|embeddings?)|class_embedding|^A_log)s?|^w?pe|^pos|rel_pos_[thw]"
    r"|_bias_[uv]|scale_shift_table|modulation)$"
)
_FACTORS = {"lora_magnitude_vector": "magnitudes of DoRA", "ia3_l": "IA3's factors"}
"""Parts of the names that `peft` gives to factors on the outputs or inputs of a layer."""
_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)$")  # where `peft` puts a module
_HEADS = re.compile(
    r"(.*_)?(heads?|classifier|fc|logits|scores?|(un)?embed(ding)?_?out|unembed(ding)?|decoder|outputs?|out|readout)"
)


@dataclass(frozen=True)
class Role:
    """The role of a parameter in its layer."""

    kind: Kind
    layer: str  # as the table of an assignment names it
    parts: int | tuple[int, ...] = 1  # the number of equal matrices fused along its outputs, or the size of each
    heads: int = 1  # the number of equal heads of queries, keys or values along its outputs; 1 if unknown
    by_head: bool = False  # whether only heads can be told apart; `parts` are then the parts of each head
    groups: int = 1
    positions: int = 1  # the kernel positions of a convolution on images whose windows overlap; else 1
    transposed: bool = False  # whether a convolution is, or a matrix is stored with its inputs first
    first: bool = False  # whether its layer is the model's first
    last: bool = False  # whether its layer is the model's last
    doubt: str = ""  # the uncertainty about it, and the override that decides; empty if it is certain

    def outputs(self, shape: Sequence[int]) -> int | None:
        """The number of outputs of a weight, over all of its experts; None unless it is a matrix or a kernel."""
        match self.kind:
            case "matrix":
                return shape[int(self.transposed)]
            case "experts":
                return shape[0] * shape[1 + int(self.transposed)]
            case "convolution":
                return shape[1] * self.groups if self.transposed else shape[0]
        return None


class Roles:
    """The roles of a model's parameters.

    The first layer is the first linear layer or convolution in the order of `named_modules`; frozen layers count,
    low-rank adapters do not. The last layer is the last linear layer with the name of a head, or else the last linear
    layer, but never a fused layer or one inside a block that the model repeats. A linear layer is an `nn.Linear`, or
    has a matrix as its weight and "linear" in the name of its class.
    """

    def __init__(self, model: nn.Module) -> None:
        self.owners = dict(model.named_modules(remove_duplicate=False))
        all_layers = [(name, module) for name, module in model.named_modules() if not _adapter(name)]
        layers = {name: module for name, module in all_layers if _is_linear(module) or isinstance(module, _ConvNd)}
        linears = [name for name, module in layers.items() if _is_linear(module)]
        self._first = next(iter(layers.values()), None)
        outside = [name for name in linears if not self._repeated(name)]
        heads = [name for name in outside if _HEADS.fullmatch(_own_name(name)) and not self._in_list(name)]
        last = heads[-1] if heads else linears[-1] if linears and linears[-1] in outside else None
        self._last = None if last is None else self.owners[last]
        at_the_end = last is not None and next(reversed(layers)) == last  # no convolution comes after it
        in_sequence = at_the_end and last.rpartition(".")[2].isdigit() and not self._in_list(last)
        self._sure_of_last = bool(heads) or in_sequence or not last

    def _repeated(self, name: str) -> bool:
        """Whether a module is part of attention, or of a block with a sibling of the same shapes."""
        line = self._down_to(name)
        numbered = [i for i, part in enumerate(name.split(".")[:-1]) if part.isdigit()]
        return isinstance(line[-2], nn.MultiheadAttention) or any(
            _alike(line[i + 1], other) for i in numbered for other in line[i].children() if other is not line[i + 1]
        )

    def _in_list(self, name: str) -> bool:
        return any(isinstance(module, nn.ModuleList) for module in self._down_to(name))

    def _down_to(self, name: str) -> list[nn.Module]:
        """The modules that contain the named one, from the model down, and the named one."""
        parts = name.split(".")
        return [self.owners[".".join(parts[:i])] for i in range(len(parts) + 1)]

    def layer_of(self, name: str) -> tuple[nn.Module, str]:
        """The layer of a parameter, also if it is parametrized, and the parameter's name in the layer.

        The magnitudes of `weight_norm` are called `weight_g`, its directions `weight`. If another parametrization has
        several originals, none of them is the layer's weight, so they belong to the parametrization.
        """
        module_name, _, leaf = name.rpartition(".")
        module = self.owners[module_name]
        if isinstance(module, ParametrizationList):
            layer_name, _, served = module_name.rpartition("parametrizations.")
            names = {"original0": f"{served}_g", "original1": served} if isinstance(module[0], _WeightNorm) else {}
            if name_there := {"original": served, **names}.get(leaf):
                return self.owners[layer_name.removesuffix(".")], name_there
        elif is_original(module, leaf):
            return module, leaf.rpartition("_")[0]
        return module, leaf

    def role(self, name: str, shape: Sequence[int]) -> Role | None:
        """The role of a parameter; None if it is unknown."""
        module, leaf = self.layer_of(name)
        if factors := [layer for part, layer in _FACTORS.items() if part in name.split(".")]:
            role = Role("gain", factors[0])
        elif len(shape) == 2 and (factor := _adapter(name)):  # as `peft` and `loralib` name them
            of_table = "embedding" in factor
            kind: Kind = "one-hot columns" if factor == "lora_embedding_A" else "matrix"
            role = Role(
                kind, f"LoRA's {factor[-1]}" + " of an embedding" * of_table, self._parts_below(name, factor, shape[0])
            )
        elif leaf.startswith("weight") and leaf.endswith("_g"):
            role = Role("gain", "magnitudes of weight_norm")
        else:
            role = _by_layer(module, leaf) or self._by_name(name, module, leaf, shape)
        if role is not None and role.kind == "embedding" and self._is_bias_table(name, shape):
            return Role("attention bias", f"{role.layer}, a number for each head")
        if role is None or leaf != "weight" or role.kind not in ("matrix", "convolution"):
            return role
        first, last = module is self._first, module is self._last
        if role.kind == "matrix" or (math.prod(shape[2:]) == role.groups == 1 and not role.transposed):
            d_out, d_in = reversed(shape) if role.transposed else shape[:2]
            around = self._down_to(_ADAPTED.sub("", module_path(name)))[::-1]
            layout = projection(_own_name(module_path(unwrapped(name))), d_out, d_in, around)
            fused = layout.parts != 1 or layout.by_head
            if fused or layout.heads != 1 or (layout.doubt and role.kind == "matrix"):
                last = False  # a projection of attention is not the model's head
                layer = f"{role.layer}, {layout.what}" if fused else role.layer
                parts, heads, by_head = layout.parts, layout.heads, layout.by_head
                role = replace(role, layer=layer, parts=parts, heads=heads, by_head=by_head, doubt=layout.doubt)
        if last and not self._sure_of_last:
            role = replace(role, doubt="is taken for the model's head, as its last nn.Linear; Spectral() if not")
        return replace(role, first=first, last=last)

    def _parts_below(self, name: str, factor: str, d_out: int) -> int | tuple[int, ...]:
        """The parts of LoRA's B, whose outputs are those of the layer that it adapts; 1 if that one is packed."""
        base = name.partition(f".{factor}")[0] + ".base_layer"
        weight = getattr(self.owners.get(base), "weight", None)
        if factor != "lora_B" or not isinstance(weight, Tensor) or weight.ndim != 2 or d_out not in weight.shape:
            return 1
        role = self.role(f"{base}.weight", weight.shape)
        return 1 if role is None or role.by_head else role.parts

    def _is_bias_table(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a table `(distances, heads)` adds to the logits of attention, as T5's does."""
        layer, heads = _own_name(module_path(name)), attention_heads(self._down_to(module_path(name))[::-1])
        relative, bias = "rel" in layer, "bias" in layer
        return (relative and bias) or ((relative or bias) and heads is not None and shape[1] == heads.count)

    def _by_name(self, name: str, module: nn.Module, leaf: str, shape: Sequence[int]) -> Role | None:
        """Parameters of layers that torch does not have."""
        kind, ndim = type(module).__name__, len(shape)
        if ndim == 0:
            return Role("gain", "one number")
        if _LAYER_SCALE.search(leaf) or (ndim == 1 and leaf in _GAIN_NAMES and "norm" in kind.lower()):
            return Role("gain", f"gain of {kind}, by its name")
        if ndim == 1 and isinstance(module, nn.PReLU):
            return Role("gain", "nn.PReLU")
        if ndim == 1 and leaf == "weight" and re.search("linear|embedding|conv", kind.lower()):
            doubt = "may hold matrices in one dimension, and was taken for a vector; None, which leaves it to AdamW,"
            return Role("vector", f"{kind}, one dimension", doubt=doubt)
        if ndim == 1 or _TOKENS.search(leaf) or leaf.endswith("_bias") or leaf == "bias":
            named = "vector" if leaf != "bias" else "bias"
            return Role("vector", named if ndim == 1 else f"{leaf}, by its name")
        if re.search("relative_position_bias|attention_biases", leaf) and ndim == 2:
            return Role("attention bias", f"{leaf}, by its name")
        if leaf.endswith("latents") and ndim == 2:
            return Role("embedding", f"{leaf}, by its name")
        if ndim == 2 and leaf == "weight" and (known := re.search("router|gate|linear|embedding", kind.lower())):
            return Role("embedding" if known[0] == "embedding" else "matrix", f"{kind}, by its name")
        if ndim >= 3 and sum(size > 1 for size in shape) <= 1:
            return Role("vector", "one vector, by its shape")
        layout = experts(leaf, shape, self._down_to(module_path(name))[::-1]) if ndim == 3 else None
        if layout is not None:
            return Role("experts", f"{kind}, experts", layout.parts, transposed=layout.transposed, doubt=layout.doubt)
        if shape[0] == 1 and leaf != "weight":
            doubt = "may hold a matrix, and was taken for vectors because the first dimension is 1; "
            return Role("vector", "first dimension of 1", doubt=doubt + ("Spectral()" if ndim == 2 else "Experts()"))
        return None


def module_path(name: str) -> str:
    """The name of the module of a parameter, without the modules of a parametrization."""
    return name.rpartition(".")[0].partition(".parametrizations")[0]


def _own_name(path: str) -> str:
    """The last part of a module's path that is not a number, such as a place in a sequence; empty if none."""
    return next((part for part in reversed(_ADAPTED.sub("", path).split(".")) if not part.isdigit()), "")


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are of one class, and their parameters of equal names and shapes."""
    if type(one) is not type(other):
        return False
    return [(n, p.shape) for n, p in one.named_parameters()] == [(n, p.shape) for n, p in other.named_parameters()]


def _adapter(name: str) -> str:
    """The part of a name that marks a low-rank adapter, such as `lora_A`; empty if there is none."""
    return next((part for part in name.split(".") if part.startswith("lora_")), "")


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is an `nn.Linear`, or has a matrix as its weight and "linear" in the name of its class."""
    weight = module._parameters.get("weight")
    matrix = weight is not None and not is_lazy(weight) and weight.ndim == 2
    return isinstance(module, nn.Linear) or (matrix and "linear" in type(module).__name__.lower())


def _by_layer(module: nn.Module, leaf: str) -> Role | None:
    """Parameters of torch's layers, and of the `Conv1D` of `transformers`."""
    match module, leaf:
        case nn.Embedding() | nn.EmbeddingBag(), "weight":
            return Role("embedding", "nn.Embedding")
        case nn.Linear(), "weight":
            return Role("matrix", "nn.Linear")
        case _ConvNd(), "weight":
            size, layer = module.kernel_size, f"nn.{'ConvTranspose' if module.transposed else 'Conv'}"
            plane = sum(n > 1 for n in size) > 1  # and not along one axis
            overlap = plane and any(step < n for step, n in zip(module.stride, size, strict=True))
            return Role(
                "convolution", f"{layer}{len(size)}d", groups=module.groups, transposed=module.transposed,
                positions=math.prod(size) if overlap else 1,
            )  # fmt: skip
        case nn.MultiheadAttention(), "in_proj_weight":
            heads = 3 * module.num_heads
            return Role("matrix", "nn.MultiheadAttention: queries, keys, values", parts=3, heads=heads)
        case nn.MultiheadAttention(), "q_proj_weight" | "k_proj_weight" | "v_proj_weight":
            return Role("matrix", "nn.MultiheadAttention", heads=module.num_heads)
        case nn.MultiheadAttention(), "in_proj_bias" | "bias_k" | "bias_v":
            return Role("vector", "nn.MultiheadAttention")
        case nn.RNNBase() | nn.RNNCellBase(), _ if leaf.startswith(("bias", "weight")):
            kind = module.mode.partition("_")[0] if isinstance(module, nn.RNNBase) else type(module).__name__
            if leaf.startswith("bias"):
                return Role("vector", f"nn.{kind}")
            parts = 1 if leaf.startswith("weight_hr") else _GATES.get(kind.removesuffix("Cell"), 1)
            return Role("matrix", f"nn.{kind}", parts=parts)
        case nn.LayerNorm() | nn.RMSNorm() | nn.GroupNorm() | _NormBase(), "weight" | "bias":
            kind, what = ("gain", "gain") if leaf == "weight" else ("vector", "bias")
            return Role(kind, f"{what} of a norm layer")
    if f"{type(module).__module__}.{type(module).__name__}" == "transformers.pytorch_utils.Conv1D" and leaf == "weight":
        return Role("matrix", "Conv1D of transformers", transposed=True)
    return None
