"""`certify`: capture what a model executes, and bound every operation."""

import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wellnormed._devices import default_on_cpu
from wellnormed._inputs import require_choice, require_numbers
from wellnormed._modes import without_autocast
from wellnormed._ranges import POSITIVE
from wellnormed._version import VERSION
from wellnormed._warnings import warn
from wellnormed.certificates.arguments import (
    domain_from,
    example_of,
    require_cpu,
    require_model_or_program,
    unwrapped,
    with_keywords,
)
from wellnormed.certificates.certificate import Certificate
from wellnormed.certificates.orders import require_lanes
from wellnormed.certificates.original import compare, require_same_tensors
from wellnormed.certificates.printing import outside
from wellnormed.certificates.promising import any_entries, promise_of
from wellnormed.constraints import Constraints
from wellnormed.constraints.matching import serving
from wellnormed.lowering.networks import Joint
from wellnormed.lowering.walk import Walk, walked
from wellnormed.program.capturing import capture
from wellnormed.program.comparing import Comparison
from wellnormed.program.errors import UncertifiableError, refusing
from wellnormed.program.program import Program
from wellnormed.proof import Promise
from wellnormed.proof.arithmetic import Arithmetic
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
    arithmetic: Arithmetic | Literal["real"] | None = None,
    original: nn.Module | Program | None = None,
    **inputs: Any,
) -> Certificate:
    """Prove how much a model's result can change when its input changes: a Lipschitz constant, with its proof.

    `certify(model, example_input).lipschitz` is a number L: if two inputs of the domain differ by d, their results
    differ by at most `L d`. Both differences are the largest Euclidean norm over groups of entries: vectors of an input
    `(B, D)`, tokens of `(B, T, D)`, whole samples of tensors with more axes, and of signals `(B, C, L)`, whose first
    product is a convolution along the last axis. Of several inputs the largest change counts.
    `Certificate.rms_lipschitz` compares root mean squares (RMS) instead. `print` shows the bound of every
    operation, `Certificate.save` writes a file, and `verify` proves that file again.

    The domain contains all inputs whose groups have an RMS of at most `radius`, or whose entries lie in `box`. For
    integer inputs the certified variable is the embedded vectors, and the domain is widened to contain all rows of the
    table. Masks, other integers and arguments that are not
    tensors are fixed to the example's values.

    The proof holds for the captured program (the graph with its stored tensors, which `wellnormed.export` writes and
    runs) in real arithmetic; `forward_error` bounds what execution in floats adds, in any order of sums. A conversion
    between floats of 16 bits or more counts as the identity; if it rounds, `Certificate.rounds` lists it, and a
    formula with such a conversion inside is not recognised as one. A conversion to fewer bits is refused.

    Args:
        model: Any module, in evaluation mode; or a `Program` that `capture` returned, which has its own example and
            output. The model's code is then neither run nor compared with the program.
        example_input: The arguments of a call of the model: a tensor, a tuple of arguments, or a dictionary of
            keywords. A model with a method `example_input()`, such as those of `wellnormed.models`, needs none.
        radius: Largest RMS of an input vector, token or sample; `math.inf` for every finite input in real arithmetic
            (executed in floats, large ones may overflow). The bound is then computed at the largest number of the
            input's dtype: enormous if the model's slope grows with its input, as that of attention without a norm
            layer or ball projection before it, and no larger than for a small radius otherwise.
        box: Lowest and highest entry of the input, instead of `radius`: `(0, 1)` for pixels.
        output: Which tensor, if the model returns several: a key, an attribute's name, or a position.
        margins: Whether to bound the difference of any two logits too, `Certificate.margin`. The model's last operation
            must be a linear map; time grows with the square of the number of its outputs.
        within: Constraints on the model's weights, as `constrain` returned them. The proof then uses their caps on
            norms instead of the weights' entries, and holds for every model whose weights keep these caps: before the
            first step of training and after each. Every trained parameter that the bound depends on needs a cap;
            parameters that only attention's logits depend on do not. Frozen parameters and buffers, such as running
            statistics, keep their values. Autocast does not count: the constant is of weights that nothing rounds, and
            `certify` without `within` has that of a model with its weights rounded.
        effort: With `high`, chains of linear maps and entrywise functions, with or without residuals, are bounded
            jointly by the multipliers of LipSDP instead of by the product of their norms. Finding these takes seconds
            to minutes. Convolutions, attention and normalizations are bounded as before. (`require_same_model` passes
            the multipliers of a certificate, as a `Joint`.)
        arithmetic: How the program's sums and products are executed, for `Certificate.forward_error`: an `Arithmetic`
            says more than that sums have any order. With `"real"`, rounding errors are left out, and
            `Certificate.certified_radius` holds in real arithmetic.
        original: The same model with other weights, such as before it was quantised, pruned or fine-tuned, in the same
            dtype. `Certificate.change` then bounds how far the results of both are apart, and `Certificate.unchanged`
            says which predictions are the same.
        inputs: Further arguments of the model's call, by keyword, beside or instead of `example_input`:
            `input_ids=tokens`. An input whose name is one of the settings above goes into the dictionary
            `example_input`.

    Raises:
        UncertifiableError: An operation has no bound, or none for these arguments, or the model's code depends on
            something that the captured operations do not show. The message names the operation, the module, the line of
            the model, and a remedy.
        ValueError: `radius` is not positive; `box` is not two numbers in order; `within` constrains no parameter of the
            model, or one lies above its cap; `original` computes something else; or a keyword is neither a setting nor
            an input of the model, or looks like a misspelt setting.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        >>> _ = nn.init.constant_(model[0].weight, 0.5)
        >>> certificate = certify(model, torch.zeros(1, 2))
        >>> 1 <= certificate.lipschitz < 1 + 1e-6
        True
    """
    require_model_or_program("certify", model, example_input=example_input, output=output, within=within, **inputs)
    model = unwrapped(model)
    require_cpu(model.module if isinstance(model, Program) else model, within)
    if not isinstance(effort, Joint):
        require_choice("certify: effort", effort, ("standard", "high"))
    joint = effort if isinstance(effort, Joint) else Joint() if effort == "high" else None
    if within is not None and joint is not None:
        raise ValueError(
            "certify: effort='high' needs the entries of weights, and within= knows their caps only; leave one out"
        )
    if arithmetic not in (None, "real") and not isinstance(arithmetic, Arithmetic):
        raise ValueError(f"certify: arithmetic={arithmetic!r} must be an Arithmetic or 'real'")
    execution = None if arithmetic == "real" else arithmetic or Arithmetic()
    if execution is not None:
        require_choice("certify: products of Arithmetic", execution.products, ("float32", "tf32", "bfloat16"))
        lanes = {} if execution.lanes is None else {"lanes of Arithmetic": execution.lanes}
        require_numbers("certify: ", lanes, POSITIVE, whole=True)
    if original is not None:
        if within is not None or joint is not None:
            raise ValueError(
                f"certify: original= needs the entries of weights and bounds them one by one, got "
                f"{'within=' if joint is None else 'effort='} beside it; leave one out"
            )
        original = unwrapped(original)
        if not isinstance(original, Program if isinstance(model, Program) else nn.Module | Program):
            raise ValueError(
                f"certify: original= must be a module, and a Program if the model is one, got {type(original).__name__}"
            )
        require_cpu(original.module if isinstance(original, Program) else original, None)
        require_same_tensors(model, original)
    settings: dict[str, Any] = {"radius": radius, "box": box, "output": output, "margins": margins, "within": within}
    settings |= {"effort": effort, "arithmetic": arithmetic, "original": original}
    example = example_input
    if not isinstance(model, Program):
        example = with_keywords("certify", model, example_input, settings, inputs)
    domain = domain_from("certify", radius, box)
    walks: list[Walk] = []

    def bound(program: Program) -> None:
        promises = {} if isinstance(model, Program) else promises_of(model, within, program)
        walk = partial(walked, program, domain, margins=margins, arithmetic=execution)
        try:
            walks.append(walk(promises))
        except UncertifiableError as error:
            without = [name for name, promise in promises.items() if promise is None]
            if isinstance(model, Program) or not without:
                raise
            walks.append(_of_logits(walk, program, promises, refused(error, model, without)))
        if joint is not None:
            walks[-1] = joint.improved(walks[-1])
            walks[-1].run(margins)

    def captured(model: nn.Module | Program, accept: Callable[[Program], None]) -> Program:
        if isinstance(model, Program):
            accept(model)
            return model
        with nullcontext() if within is None else without_autocast():  # caps are of weights that nothing rounds
            return capture(model, example, output, domain=domain, accept=accept)

    if not isinstance(model, Program):
        example = example_of(model, example, "certify")
    program = captured(model, bound)
    comparison = None if isinstance(model, Program) else program.comparison
    if execution is not None and execution.lanes:
        proof = walks[-1].ledger.proof
        require_lanes(proof.rows.values(), execution, proof.shape_of)
    replaced = None
    if original is not None:
        others: list[Walk] = []

        def follow(program: Program) -> None:
            others.append(Walk(program, domain, apart=walks[-1].ledger.apart, arithmetic=execution))
            others[-1].ledger.followed = iter(walks[-1].ledger.choices)
            others[-1].run(margins)

        try:
            captured(original, follow)
        except UncertifiableError as error:
            raise UncertifiableError(f"in original=, {error}") from error
        replaced = compare(walks[-1], others[-1])
    certificate = certificate_of(walks[-1], program, comparison, replaced)
    if margins and (found := outside(program, certificate.inputs)):
        warn(f"certify: radii of predictions hold inside of the domain alone, and {found[0]}")
    return certificate


def certificate_of(
    walk: Walk,
    program: Program | None = None,
    comparison: Comparison | None = None,
    replaced: dict[str, str] | None = None,
) -> Certificate:
    """Make the certificate that a finished walk proves of its program; `certify` also runs the model's code.

    Args:
        walk: The walk.
        program: The program to put into the certificate, if it differs from the walk's: the same graph, but for the
            whole batch as one sample.
        comparison: How the model's code was compared with the program.
        replaced: Name of a tensor -> name of the original's, as `original.compare` returned it.

    Every row and every claim has been checked by `walk.ledger.proof` already, with the tensors as they are stored.
    """
    program = program or walk.program
    used, proof = sorted((walk.ledger.used | walk.fixed).items()), walk.ledger.proof
    known = {name: each for name, each in sorted(walk.stored.items()) if name not in walk.ledger.promises}
    known |= {own: walk.ledger.used[own] for name, own in (replaced or {}).items() if name in known}
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
        execution=proof.arithmetic,
        original=replaced,
        unbounded_at=proof.values[next(reversed(proof.rows))].fault,
        comparison=comparison,
        program=program,
        versions={"wellnormed": VERSION, "torch": str(torch.__version__), "numpy": np.__version__}
        | {"python": platform.python_version()},
    )
    with refusing(lambda error: f"the derived certificate is not valid ({error}); please report it"):
        document = parse_json(certificate.text().encode(), "the certificate")  # as it will be read from its file
        conclude(read(Document, document, "the certificate"), proof)
    return certificate


def refused(error: UncertifiableError, model: nn.Module, names: list[str]) -> UncertifiableError:
    """The error with a remedy: a call of `constrain` for those of the named parameters that have a norm."""
    try:
        assigned = assign_norms(model)
    except ValueError:  # a parameter has no norm by default
        return error
    norms = {name: a.norm for a in assigned for name in (a.name, *a.aliases) if a.norm is not None}
    pairs = ", ".join(f"{name!r}: wn.constraints.{serving(norms[name])}(1.0)" for name in names if name in norms)
    return UncertifiableError(
        f"{error}. What has no promise may have one by wn.constrain(optimizer, {{{pairs}}}), with the other "
        "constraints beside them, after remove()"
    )


def _of_logits(
    walk: Callable[..., Walk], program: Program, promises: dict[str, Promise | None], error: UncertifiableError
) -> Walk:
    """Walk again, with entries up to 10^36 in parameters that have no promise; for models with attention.

    Such a bound is useful only if attention's logits, which bound the softmax's weights, stay small nevertheless.

    Raises:
        UncertifiableError: `error`, if the model has no attention or its logits depend on these parameters.
    """
    try:
        filled = {name: each or any_entries(name, program.stored[name].tensor) for name, each in promises.items()}
        found = walk(filled)
    except UncertifiableError:
        raise error from None
    logits = [max(row.logits) for row in found.ledger.proof.inferences if row.logits is not None]
    if not logits or max(logits) > _ANY_LOGIT:
        raise error
    return found


_ANY_LOGIT = 1e30
"""Larger logits are taken to depend on parameters without a promise, whose entries may reach 10^36."""


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
        model: The model.
        program: The program that was captured from the model.
        promises: Name of a parameter of the model -> its promise.
        others: Further parameters that change.
    """
    stored = [(name, each.tensor) for name, each in program.stored.items()]
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
