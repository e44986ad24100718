"""The graph of the operations that a model executes, or a refusal that says where tracing stopped.

torch.fx calls the model once with symbolic values. Modules with a rule become one node; all others are traced
through. What a symbolic call cannot see (hooks, overridden methods, values written in place) is refused.
"""

import operator
import re
import traceback
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, fx, nn

from wellnormed.certificates.recorder import UncertifiableError
from wellnormed.certificates.rules import RULES
from wellnormed.nn import CappedEmbedding

EMBEDDINGS = (nn.Embedding, CappedEmbedding)
"""Lookups whose vectors are the input variable; exact types."""

_TORCH = torch.__file__.removesuffix("__init__.py")


class _OneArgument(nn.Module):
    """Calls the model with its input alone, so that all other arguments take their defaults."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class _Proxy(fx.Proxy):
    """A symbolic value that records in-place operators, which torch.fx would take for `x = x + y`."""


def _record_in_place(name: str) -> None:
    def record(self: _Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    setattr(_Proxy, f"__{name}__", record)


for _name in ("iadd", "isub", "imul", "itruediv", "imatmul", "ipow"):
    _record_in_place(_name)


class _Tracer(fx.Tracer):
    record_stack_traces = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in RULES or type(m) in EMBEDDINGS

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def trace(model: nn.Module) -> fx.GraphModule:
    """The executed operations; the model stands at the attribute `model` of the result.

    Raises:
        UncertifiableError: A module carries hooks, a parametrization or a `forward` of its own, or the
            control flow depends on values of the input.
    """
    _refuse_overrides(model)
    wrapped = _OneArgument(model)
    try:
        graph = _Tracer().trace(wrapped)
    except Exception as error:  # torch.fx raises whatever the model's own code raises on a symbolic value
        raise UncertifiableError(
            f"{type(model).__name__} cannot be traced: {_line(error) or error}: {error}. Control flow may "
            "not depend on the values or shapes of the input; move the operation into a module and give that "
            "a rule"
        ) from error
    return fx.GraphModule(wrapped, graph)


def place(node: fx.Node) -> str:
    """Operation, module and line of the model behind a node."""
    target = node.target
    operation = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    kind = {"call_module": "module", "call_method": "method", "get_attr": "tensor"}.get(node.op, "operation")
    frames = re.findall(r'File "(.+?)", line (\d+), in .+\n\s*(.*)', node.stack_trace or "")
    frames = [frame for frame in frames if not frame[0].startswith(_TORCH) and frame[0] != __file__]
    line = f" at {frames[-1][0]}:{frames[-1][1]} `{frames[-1][2].strip()}`" if frames else ""
    return f"{kind} `{shown(operation)}` in module `{owner(node) or 'model'}`{line}"


def owner(node: fx.Node) -> str:
    """Path of the module whose `forward` the node belongs to; empty for the model itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return shown(stack[-1][0]) if stack else ""


def shown(path: str) -> str:
    """A path as the user knows it, without the wrapper's attribute."""
    return path.removeprefix("model").removeprefix(".") if path == "model" or path.startswith("model.") else path


def _refuse_overrides(model: nn.Module) -> None:
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise UncertifiableError("a global forward hook is registered for all modules; remove it")
    for name, module in model.named_modules():
        where = f"module `{name or 'model'}` ({type(module).__name__})"
        for own in vars(module).keys() & {"forward", "_call_impl"}:
            raise UncertifiableError(f"{where} has a `{own}` of its own instance; give it a class and a rule")
        if module._forward_hooks or module._forward_pre_hooks:
            raise UncertifiableError(f"{where} carries forward hooks, which may change its values; remove them")
        if hasattr(module, "parametrizations"):
            raise UncertifiableError(
                f"{where} is parametrized, so its weight is not the one stored; "
                "call `torch.nn.utils.parametrize.remove_parametrizations` first"
            )


def _line(error: BaseException) -> str:
    """The innermost line of the traceback outside torch."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(_TORCH) and file != __file__]
    return own[-1] if own else ""
