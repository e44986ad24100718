"""`constrain`: attach constraints to an optimizer, by patterns of names, by a constant or by a largest logit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wellnormed._inputs import require_choice, require_flags, require_numbers
from wellnormed._ranges import POSITIVE
from wellnormed.certificates.sizes import UNITS, Unit
from wellnormed.constraints import Constraint, Constraints
from wellnormed.constraints.matching import attach, constrainable, norms_of
from wellnormed.optim.around import stepping
from wellnormed.routing import Assignment


def constrain(
    optimizer: torch.optim.Optimizer,
    constraints: Mapping[str, Constraint] | None = None,
    norms: Assignment | nn.Module | None = None,
    *,
    prove: bool = True,
    lipschitz: float | None = None,
    norm: Unit = "euclidean",
    largest_logit: float | None = None,
    example_input: Any = None,
    radius: float = 1.0,
    box: tuple[float, float] | None = None,
    output: str | int | None = None,
    every: int = 8,
    move_every: int = 100,
    accept_small_range: bool = False,
) -> Constraints:
    """Keep the norms of a model's weights bounded while an optimizer trains it.

    There are three ways to say how. `constrain(optimizer, {"*": HardCap(1.0)})` caps the norms of all parameters whose
    names match a pattern. `constrain(optimizer, lipschitz=10.0, example_input=x)` chooses the caps itself, so that
    `certify(model, x, within=constraints)` proves a Lipschitz constant of at most 10, in Euclidean norms, after every
    step; see `certificates.budget.Budget`. `constrain(optimizer, largest_logit=30.0, example_input=x)` chooses caps
    within which no attention logit exceeds 30 in absolute value, for any input and before masks; see
    `certificates.logits.Logits`. `print` of the result shows which parameter is kept in which bound.

    Weights above their cap are projected onto it at once; from then on every step is checked before and corrected
    after. A parameter that did not move is left alone. The bounds hold as long as only the optimizer changes the
    weights; after other code has written into them, call `project_()` on the result.

    That call is not needed where torch counts the write: `load_state_dict`, writes into a parameter, and new memory in
    its place, as by `vector_to_parameters`. Such weights are projected before the next step, unless they are proved to
    be in bounds; a checkpoint that is in bounds is continued bit for bit. Not counted are writes through
    `parameter.data` or a NumPy view, and `torch.distributed.checkpoint.load` into weights sharded over processes.

    Closures, pre-hooks of the step, and subclasses around `step` may change rates and weights of this library's
    optimizers, whose constraints act within the step itself. For any other optimizer, register your own pre-hooks
    before this call and your own post-hooks after it, and do not write weights in a closure; post-hooks that write
    weights come after this call for all optimizers. Each constraint's text states what it guarantees, if anything. A
    copied or unpickled optimizer of this library keeps its constraints; those of `lipschitz` and `largest_logit` can be
    copied, and not pickled.

    Args:
        optimizer: Any optimizer. Those of `wellnormed.optim` know their parameters' names and norms and the norm of
            their steps; for any other pass `norms`.
        constraints: Name pattern (`fnmatch`; a module's name stands for all parameters in it) -> constraint. Each must
            act on at least one parameter that its pattern matches (a spectral one skips biases; `print` shows which
            parameters are constrained, and why others are not), and no parameter may have two different ones. With
            `lipschitz` or `largest_logit` these are kept, and caps are chosen for the other parameters.
        norms: The model, or what `assign_norms` returned for it; needed for optimizers of other libraries.
        prove: Whether norms that are computed from singular values are proved now, and whenever a state is loaded. It
            costs `m n^2` float64 operations per weight on one thread of the CPU. With False every cap rescales its
            weights in floats, aiming 2e-5 below the cap and ending at most 1e-5 above it, and `load_state_dict` trusts
            that the weights are those that the state was saved with. Pass False only if checksums confirm this, and
            prove the model that you publish.
        lipschitz: The largest Lipschitz constant: `Certificate.lipschitz`, which compares Euclidean norms of vectors,
            tokens or samples. Of a model that trains under autocast, it is that of the same weights outside.
        norm: With `lipschitz`, `rms` for a constant that compares root mean squares (RMS), `Certificate.rms_lipschitz`;
            `print` of the result shows both.
        largest_logit: The largest attention logit. Caps are in the norms of `assign_norms(model, per_head=True)` unless
            `norms` is an assignment.
        example_input: With `lipschitz` or `largest_logit`, the arguments of a call of the model, as in `certify`; so
            are `radius`, `box` and `output`.
        radius: Largest RMS of an input vector, token or sample. Logits behind norm layers are bounded for all inputs.
        box: Lowest and highest entry of the input, instead of `radius`.
        output: Which tensor, if the model returns several.
        every: With `lipschitz` or `largest_logit`, how many steps the chosen caps may wait before they act, as in
            `HardCap`. They hold after every step all the same, by the bounds of the steps. With 1 they act after every
            step, and a CUDA graph can record it.
        move_every: With `lipschitz`, the number of steps between two moves of the caps; 0 for caps that never move.
        accept_small_range: With `lipschitz`, whether to accept caps within which the result keeps less than a tenth of
            its range, as in a model with ordinary norm layers, or less than a fifth of a gain that the constant allows,
            as in residual networks with batch norm. By default they are refused. Below a quarter of the range, a
            warning states the share that is left, and how far weights were moved.

    Returns:
        The attached constraints, with `project_()`, `norm_ratios()` (estimates), `proved_ratios()`, `state_dict()` and
        `remove()`.

    Raises:
        ValueError: An argument is invalid; the result could hardly change (`accept_small_range`); or no caps give so
            small a constant or logits: the message then states the smallest possible value, and which operations
            prevent less.
        UncertifiableError: With `lipschitz` or `largest_logit`, an operation of the model has no bound.

    Example:
        >>> import torch, wellnormed as wn
        >>> model = torch.nn.Linear(8, 8, bias=False)
        >>> optimizer = wn.Scion(model, lr=0.5)
        >>> constraints = wn.constrain(optimizer, {"weight": wn.SoftCap(1.0)})
        >>> for _ in range(20):
        ...     model(torch.randn(4, 8)).sum().backward()
        ...     optimizer.step()
        >>> constraints.proved_ratios()["weight"] <= 1
        True
    """
    inner = constrainable(optimizer)
    require_flags("constrain: ", {"prove": prove, "accept_small_range": accept_small_range})
    given_numbers = {"lipschitz": lipschitz, "largest_logit": largest_logit}
    require_choice("constrain: norm", norm, UNITS)
    numbers = {name: number for name, number in given_numbers.items() if number is not None}
    if len(numbers) > 1:
        raise ValueError("constrain: lipschitz= and largest_logit= are two searches for caps; call it for one of them")
    asked = {
        "norm": None if norm == "euclidean" else norm,
        "move_every": None if move_every == 100 else move_every,
        "accept_small_range": accept_small_range or None,
    }
    if not numbers:
        asked |= {"example_input": example_input, "box": box, "output": output}
        asked |= {"radius": None if radius == 1 else radius, "every": None if every == 8 else every}
    unused = [name for name, value in asked.items() if value is not None]
    if lipschitz is None and unused:
        of, remedy = ("", "") if numbers else (" or largest_logit=", ", or pass lipschitz=10.0; caps have an every too")
        raise ValueError(f"constrain: {', '.join(unused)} given without lipschitz={of}; leave this out{remedy}")
    if not numbers:
        if constraints is None:
            raise ValueError(
                "constrain: nothing says what to keep; pass {'*': HardCap(1.0)}, or lipschitz=10.0 and example_input="
            )
        return _sweeping(attach(inner, constraints, norms_of(inner, norms), prove), inner, optimizer)
    from wellnormed.certificates.arguments import domain_from  # with what captures programs, which caps do without
    from wellnormed.certificates.choosing import Asked, constrain_to

    domain = domain_from("constrain", radius, box)
    ((what, most),) = numbers.items()
    require_numbers("constrain: ", {what: most}, POSITIVE)
    search = Asked(what, float(most), example_input, domain, output, norm, every, move_every, accept_small_range)
    return _sweeping(constrain_to(inner, constraints or {}, norms, prove, search), inner, optimizer)


def _sweeping(constraints: Constraints, inner: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> Constraints:
    """The constraints of `inner`, which also act after the steps of a wrapper that was given and has no hooks.

    What stands around an average holds no iterates, and is left alone.
    """
    if inner is not optimizer and inner is stepping(optimizer):
        constraints.sweep_after(optimizer)
    return constraints
