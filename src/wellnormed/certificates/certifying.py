"""`certify`: capture what a model executes, and bound every operation."""

import inspect
import platform
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wellnormed._devices import default_on_cpu
from wellnormed._inputs import require_module, require_numbers
from wellnormed._version import VERSION
from wellnormed.certificates.certificate import Certificate
from wellnormed.certificates.promising import any_entries, promise_of
from wellnormed.constraints import Constraints
from wellnormed.constraints.matching import serving
from wellnormed.lowering.networks import Joint
from wellnormed.lowering.walk import Walk, walked
from wellnormed.program.capturing import capture
from wellnormed.program.comparing import Comparison
from wellnormed.program.domain import Box, Domain
from wellnormed.program.errors import UncertifiableError, refusing
from wellnormed.program.program import Example, Program, tensors_of
from wellnormed.program.program import arguments_of as arguments_of_call
from wellnormed.proof import Promise
from wellnormed.proof.check import conclude
from wellnormed.proof.decimals import assumed, shown
from wellnormed.proof.files import parse_json
from wellnormed.proof.reading import read
from wellnormed.proof.rows import Document
from wellnormed.routing import assign_norms


@default_on_cpu()
def certify(
    model: nn.Module | Program,
    example_input: Any = None,
    radius: float = 1.0,
    *,
    box: tuple[float, float] | None = None,
    output: str | int | None = None,
    margins: bool = False,
    within: Constraints | None = None,
    effort: Literal["standard", "high"] | Joint = "standard",
    **inputs: Any,
) -> Certificate:
    """A proved Lipschitz bound of what a model executes.

    The certified variable is the input: its vectors `(B, D)`, its tokens `(B, T, D)`, or its samples if it has more
    axes. Each has a root mean square of at most `radius`, or every entry lies in `box`. If the input is integers, the
    variable is the vectors that embeddings look up. Everything else that depends on integers and flags, such as masks,
    keeps the values of the example, and so do all arguments that are no tensors.

    The proof is of the captured program, the graph with its stored tensors that `wellnormed.export` writes and runs, in
    real arithmetic; the rounding errors and overflows of its execution in floats come on top. A conversion between
    floats of 16 bits or more counts as the identity, is listed in `Certificate.rounds` if it rounds, and is part of no
    recognised function; to fewer bits it is refused.

    Args:
        model: Any module, in evaluation mode; or a program of one, which has its example and its output. The code that
            a program was captured from is not run, and so not compared with it.
        example_input: The arguments of a call of the model: a tensor, a tuple of arguments, or a dictionary of
            keywords. A model with a method `example_input()`, such as those of `wellnormed.models`, needs none.
        radius: Largest RMS of an input vector, token or sample; `math.inf` for every finite input, as real arithmetic
            has it: executed in floats, large ones may overflow. Then the bound is that of the largest numbers of the
            input's dtype: enormous where it grows with the input, as that of attention does without a norm layer or
            balls before it, and no larger where it does not.
        box: Two numbers between which all entries of the input lie, in the place of `radius`: `(0, 1)` for pixels.
        output: Which tensor, if the model returns several: a key, an attribute's name, or a position.
        margins: Whether to bound the difference of any two logits too, `Certificate.margin`. The result must be a
            linear map; time grows with the square of its outputs.
        within: Constraints on the model's weights, whose promised norms take the place of the weights' entries. The
            bound then holds for every model whose weights keep these promises: it is known before the first step of
            training, and true after each. Every trained parameter that it depends on needs a promise, or that only the
            logits of attention depend on: the constant is then that of any floats. Frozen parameters and buffers, such
            as running statistics, keep their values.
        effort: With `high`, networks of linear maps and functions of every entry, also with residuals, are bounded
            jointly: by the best multipliers of LipSDP, which take seconds to minutes to find, in the place of the
            product of norms. Convolutions, attention and normalizations are bounded as before. (`require_same_model`
            passes the multipliers of a certificate, as a `Joint`.)
        inputs: Further arguments of the call, by keyword, beside `example_input` or in its place: `input_ids=tokens`.
            An input that has the name of one of these settings goes into the dictionary `example_input`.

    Raises:
        UncertifiableError: An operation has no bound or none for these arguments, or the model does something that its
            captured operations do not show; names the operation, the module, the line of the model, and a remedy.
        ValueError: `radius` is not positive, or `box` is not two numbers in order; or `within` holds no parameter of
            the model, or one that breaks its promise; or a keyword is neither an argument of this function nor of the
            model, or is so like one of this function's that it may be meant, and no tensor.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        >>> _ = nn.init.constant_(model[0].weight, 0.5)
        >>> certificate = certify(model, torch.zeros(1, 2))
        >>> 1 <= certificate.lipschitz < 1 + 1e-6
        True
    """
    require_model_or_program("certify", model, example_input=example_input, output=output, within=within, **inputs)
    model = unwrapped(model)
    _require_cpu(model.module if isinstance(model, Program) else model, within)
    if effort not in ("standard", "high") and not isinstance(effort, Joint):
        raise ValueError(f"certify: effort must be 'standard' or 'high', got {effort!r}")
    joint = effort if isinstance(effort, Joint) else Joint() if effort == "high" else None
    if within is not None and joint is not None:
        raise ValueError(
            "certify: effort='high' needs the entries of weights, and within= knows their caps only; leave one out"
        )
    settings = {"radius": radius, "box": box, "output": output, "margins": margins, "within": within, "effort": effort}
    example = example_input
    if not isinstance(model, Program):
        example = with_keywords("certify", model, example_input, settings, inputs)
    domain = domain_from("certify", radius, box)
    walks: list[Walk] = []

    def bound(program: Program) -> None:
        promises = {} if isinstance(model, Program) else promises_of(model, within, program)
        try:
            walks.append(walked(program, domain, promises, margins))
        except UncertifiableError as error:
            without = [name for name, promise in promises.items() if promise is None]
            if isinstance(model, Program) or not without:
                raise
            walks.append(_of_logits(program, domain, promises, margins, refused(error, model, without)))
        if joint is not None:
            walks[-1] = joint.improved(walks[-1])
            walks[-1].run(margins)

    if isinstance(model, Program):
        bound(model)
        return certificate_of(walks[-1])
    program = capture(model, example_of(model, example, "certify"), output, domain=domain, accept=bound)
    return certificate_of(walks[-1], program, program.comparison)


def certificate_of(walk: Walk, program: Program | None = None, comparison: Comparison | None = None) -> Certificate:
    """Make the certificate that a finished walk proves of its program; `certify` also runs the model's code.

    Args:
        walk: The walk.
        program: What the comparison is of, if that is the walk's graph for the whole batch as one sample.
        comparison: How the model's code was compared with the program.

    The proof has checked every row and every claim, with the tensors as they are stored.
    """
    program = program or walk.program
    used, proof = sorted((walk.ledger.used | walk.fixed).items()), walk.ledger.proof
    known = {name: each for name, each in sorted(walk.stored.items()) if name not in walk.ledger.promises}
    for each in known.values():
        walk.ledger.keep(each)
    certificate = Certificate(
        rows=tuple(proof.rows.values()),
        tensors={name: proof.stored[name].digest for name in known},
        promises=tuple(proof.promises.values()),
        computed={name: each.tensor.detach().cpu().clone() for name, each in used if each.computed},
        fixed=tuple(sorted(walk.fixed)),
        attention_logits={row.name: tuple(row.logits) for row in proof.inferences if row.logits is not None},
        each_sample=program.each_sample,
        comparison=comparison,
        program=program,
        versions={"wellnormed": VERSION, "torch": str(torch.__version__), "numpy": np.__version__}
        | {"python": platform.python_version()},
    )
    with refusing(lambda error: f"what was derived is no certificate ({error}); please report it"):
        document = parse_json(certificate.text().encode(), "the certificate")  # as it will be read from its file
        conclude(read(Document, document, "the certificate"), proof)
    return certificate


def refused(error: UncertifiableError, model: nn.Module, names: list[str]) -> UncertifiableError:
    """The error, with a constraint for each of these parameters that has a norm."""
    norms = {name: a.norm for a in assign_norms(model) for name in (a.name, *a.aliases) if a.norm is not None}
    pairs = ", ".join(f"{name!r}: wn.{serving(norms[name])}(1.0)" for name in names if name in norms)
    return UncertifiableError(f"{error}. What has no promise may have one by wn.constrain(optimizer, {{{pairs}}})")


def _of_logits(
    program: Program, domain: Domain, promises: dict[str, Promise | None], margins: bool, error: UncertifiableError
) -> Walk:
    """The walk for any entries of what has no promise, if the logits of attention do not depend on these.

    Raises:
        UncertifiableError: The error that is given, as the logits depend on them, or there are none.
    """
    try:
        filled = {name: each or any_entries(name, program.stored[name].tensor) for name, each in promises.items()}
        walk = walked(program, domain, filled, margins)
    except UncertifiableError:
        raise error from None
    logits = [max(row.logits) for row in walk.ledger.proof.inferences if row.logits is not None]
    if not logits or max(logits) > _ANY_LOGIT:
        raise error
    return walk


_ANY_LOGIT = 1e30
"""From here on logits count as those of any entries, which are up to 10^36."""


def promises_of(model: nn.Module, within: Constraints | None, program: Program) -> dict[str, Promise | None]:
    """Name of every stored tensor in the memory of a trained parameter -> its promise, or None without one."""
    if within is None:
        return {}
    if not isinstance(within, Constraints):
        raise ValueError(f"certify: within={within!r} must be what `constrain` returned")
    balls = {id(parameter): (norm, bound) for parameter, norm, bound in within.balls()}
    named = list(model.named_parameters(remove_duplicate=False))
    constrained = {name: (p, *balls[id(p)]) for name, p in named if id(p) in balls}
    if not constrained:
        raise ValueError(
            "certify: within promises no bound for all steps on any parameter of this model; pass the model whose "
            "weights it constrains, and for one of them at least a constraint with such a promise, such as HardCap"
        )
    for name, (p, norm, bound) in constrained.items():
        if not float(proved := norm.upper_bound(p.detach())) <= bound:
            raise ValueError(
                f"certify: {name} has norm {shown(float(proved))}, and {assumed(bound)} is promised; take the step "
                "that brings it back, or certify without `within`"
            )
    promises = {name: promise_of(name, norm, bound, p.shape) for name, (p, norm, bound) in constrained.items()}
    return promised(model, program, promises, within.parameters())


def promised(
    model: nn.Module, program: Program, promises: Mapping[str, Promise | None], others: Iterable[Tensor] = ()
) -> dict[str, Promise | None]:
    """Name of every stored tensor in the memory of a parameter that is trained, or of one of `others` -> its promise.

    Args:
        model: Whose parameters these are.
        program: Whose stored tensors these are.
        promises: Name of a parameter of the model -> its promise.
        others: Further parameters that change.
    """
    stored = [(name, own.tensor) for name, own in program.stored.items()]
    named = list(model.named_parameters(remove_duplicate=False))
    trained = [tensor for name, tensor in named + stored if tensor.requires_grad or name in promises]
    memory = [_memory(tensor) for tensor in (*trained, *others)]
    return {
        name: promises.get(name) for name, tensor in stored if any(_overlap(_memory(tensor), other) for other in memory)
    }


def _memory(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Device, first and last address of the tensor's storage; storages of other tensors may overlap it."""
    storage = tensor.untyped_storage()
    return storage.device, storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _overlap(a: tuple[torch.device, int, int], b: tuple[torch.device, int, int]) -> bool:
    return a[0] == b[0] and max(a[1], b[1]) < min(a[2], b[2])


def unwrapped(model: Any) -> Any:
    """The module that `DistributedDataParallel` or `torch.compile` wraps, whose own code no capture follows."""
    from torch._dynamo.eval_frame import OptimizedModule  # which a capture imports anyway, in a second

    while isinstance(model, nn.parallel.DistributedDataParallel | OptimizedModule):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    return model


def domain_from(caller: str, radius: float, box: tuple[float, float] | None) -> Domain:
    """The domain that the arguments `radius` and `box` describe."""
    require_numbers(f"{caller}: ", {"radius": radius})
    if box is not None:
        if radius != 1.0:
            raise ValueError(f"{caller}: radius={radius} and box={box} are two domains; pass one")
        if not isinstance(box, tuple | list) or len(box) != 2:
            raise ValueError(f"{caller}: box={box!r} must be two numbers, such as (0, 1)")
        return Box(*box)
    if not radius > 0:
        raise ValueError(f"{caller}: radius={radius} must be positive; math.inf is every finite input")
    return float(radius)


def arguments_of(domain: Domain) -> dict[str, Any]:
    """The keywords of `certify` for a domain."""
    return {"box": (domain.low, domain.high)} if isinstance(domain, Box) else {"radius": domain}


def with_keywords(
    caller: str, model: nn.Module, example_input: Any, settings: dict[str, Any], inputs: dict[str, Any]
) -> Any:
    """Add the inputs given by keyword to the example; refuse a keyword that may be a misspelt setting."""
    for name, value in settings.items():
        if tensors_of(value):
            raise ValueError(
                f"{caller}: got a tensor in the place of the setting {name}; pass a tuple of several inputs, {caller}"
                f"(model, (x, mask)), or by keyword, and an input of that name by example_input={{{name!r}: ...}}"
            )
    if not inputs:
        return example_input
    name_of_model, accepted = type(model).__name__, inspect.signature(model.forward).parameters
    for name, value in inputs.items():
        if name in accepted:
            continue
        meant = get_close_matches(name, ["example_input", *settings, *accepted], n=1, cutoff=_ALIKE)
        hint = f"; did you mean {meant[0]}?" if meant else ""
        if not any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
            raise ValueError(f"{caller}: {name} is neither a setting nor an input of {name_of_model}.forward{hint}")
        if meant and meant[0] in settings and not tensors_of(value):
            raise ValueError(
                f"{caller}: {name}={value!r} is no setting{hint} If it is an input of {name_of_model}, pass it by "
                f"example_input={{{name!r}: ...}}"
            )
    arguments, keywords = arguments_of_call(() if example_input is None else example_input)
    if twice := keywords.keys() & inputs.keys():
        raise ValueError(f"{caller}: {', '.join(sorted(twice))} is given twice, in example_input and by keyword")
    return Example(arguments, keywords | inputs)


_ALIKE = 0.7
"""The ratio of `difflib` from which names count as alike: `raduis` and `radius` have 0.83, `boxes` and `box` 0.75."""


def _require_cpu(model: nn.Module, within: object) -> None:
    """Refuse a model on an accelerator, where products need not have the roundings that a proof counts on."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):  # the latter is refused with what it lacks
            remedy = "copy.deepcopy(model).cpu()"
            if within is not None:
                remedy = (
                    "model.cpu() and within=constraints of model, constraints = copy.deepcopy((model, constraints))"
                )
            raise ValueError(
                f"certify: {name!r} lies on {tensor.device}, and a certificate is computed on the CPU; pass {remedy}, "
                "which leaves the model where it is, and an example on the CPU"
            )


def require_model_or_program(caller: str, model: Any, /, **settings: Any) -> None:
    """Refuse anything but a module or a program, and settings of a capture beside a program that was captured."""
    if not isinstance(model, Program):
        require_module(caller, model)
    elif given := [f"{name}=" for name, value in settings.items() if value is not None]:
        raise ValueError(
            f"{caller}: a program has its example and its output, got a program and {', '.join(given)}; pass it alone, "
            "or pass the model"
        )


def example_of(model: nn.Module, example_input: Any, caller: str) -> Any:
    """The example that was given, or else the one of the model's method `example_input`."""
    if example_input is not None:
        return example_input
    method = getattr(model, "example_input", None)
    if not inspect.ismethod(method):
        raise ValueError(
            f"{caller}: {type(model).__name__} has no method `example_input`; pass example_input=, what the model is "
            "called with: a tensor, a tuple, or a dictionary"
        )
    return method()
