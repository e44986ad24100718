"""`constrain`: attach constraints to an optimizer, by patterns of names, by a constant or by a largest logit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wellnormed._inputs import require_flags
from wellnormed.constraints import Constraint, Constraints
from wellnormed.constraints.matching import attach, constrainable, norms_of
from wellnormed.routing import Assignment


def constrain(
    optimizer: torch.optim.Optimizer,
    constraints: Mapping[str, Constraint] | None = None,
    norms: Assignment | nn.Module | None = None,
    *,
    prove: bool = True,
    lipschitz: float | None = None,
    largest_logit: float | None = None,
    example_input: Any = None,
    radius: float = 1.0,
    box: tuple[float, float] | None = None,
    output: str | int | None = None,
    move_every: int = 100,
    accept_small_range: bool = False,
) -> Constraints:
    """Keep weights in bounds: constraints hold as long as only the optimizer moves the weights.

    Whoever else writes into them calls `project_()` on what this returns. Weights above their cap are brought below it
    at once; from then on every step is checked before and corrected after. A parameter that did not move is left alone.

    What torch counts is seen without a call: `load_state_dict`, and writes into a parameter or memory that is put in
    its place, as by `vector_to_parameters`. Before the next step such weights are brought back where they are not
    proved to keep their promise; a checkpoint that keeps it is continued bit for bit. Not counted are writes through
    `parameter.data` or a NumPy view, and `torch.distributed.checkpoint.load` into weights that are cut over processes.

    Rates and weights may be changed by closures, by pre-hooks of the step and around `step` in a subclass: an optimizer
    of this library has its constraints act within its step, on the numbers that it multiplies with. For any other, and
    for post-hooks that write weights, a hook of your own belongs before this one as a pre-hook and after it as a
    post-hook, and a closure must not write them. What a constraint promises, or that it promises nothing, is said in
    its own text. A copied or unpickled optimizer of this library keeps its constraints.

    With `lipschitz=10.0` the caps are found: `certify(model, example_input, within=constraints)` proves a constant of
    at most 10 after every step, and between steps. `certificates.budget.Budget` says how caps are chosen, and moved.
    With `largest_logit=30.0` caps are found within which no attention logit exceeds 30 in absolute value, for any
    input and before masks; `print` shows the number of every layer, and `certificates.logits.Logits` says how.

    Args:
        optimizer: Any optimizer. Those of `wellnormed.optim` know their parameters' names and norms and the norm of
            their steps; for any other pass `norms`.
        constraints: Name pattern (`fnmatch`; a module's name stands for all below it) -> constraint. Every one must act
            on at least one parameter that its pattern matches (a spectral one passes by biases; `print` shows what is
            constrained, what is not, and why), and no parameter may have two different ones. With `lipschitz` or
            `largest_logit` these stay as they are, and caps are found for other parameters.
        norms: The model, or what `assign_norms` returned for it; needed for optimizers of other libraries.
        prove: Whether norms by singular values are proved at once, and again when a state is loaded, which takes one
            thread of the CPU `m n^2` operations in float64 for each weight. Without it a cap writes every weight by its
            own function, which aims 2e-5 below and ends at most 1e-5 above, and `load_state_dict` takes the weights for
            those that the state was saved with: pass False where checksums say so, and prove what you publish.
        lipschitz: The constant to keep, in the norms of `certify`.
        largest_logit: The largest attention logit. Caps are in the norms of `assign_norms(model, per_head=True)` unless
            `norms` is an assignment.
        example_input: With either, the arguments of a call of the model; this, `radius`, `box` and `output` are as
            in `certify`.
        radius: Largest RMS of an input vector, token or sample. Logits behind norm layers are bounded for all inputs.
        box: Two numbers between which all entries of the input lie, in the place of `radius`.
        output: Which tensor, if the model returns several.
        move_every: With `lipschitz`, the number of steps from one move of the caps to the next; 0 for caps that stay.
        accept_small_range: With `lipschitz`, whether to attach caps within which the result keeps less than a tenth of
            its range, as those of a model with ordinary norm layers do. They are refused otherwise; below a quarter,
            a warning says what is left, and how far weights were moved.

    Returns:
        The attached constraints, with `project_()`, `norm_ratios()` (estimates), `proved_ratios()`, `state_dict()` and
        `remove()`.

    Raises:
        ValueError: An argument makes no sense; or the result could hardly move (`accept_small_range`); or the model
            cannot have a constant or logits as small as that, and the message says which it can have, and what stands
            in the way.
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
    numbers = {name: number for name, number in given_numbers.items() if number is not None}
    if len(numbers) > 1:
        raise ValueError("constrain: lipschitz= and largest_logit= are two searches for caps; call it for one of them")
    if not numbers:
        asked = {
            "example_input": example_input,
            "box": box,
            "output": output,
            "radius": None if radius == 1 else radius,
            "move_every": None if move_every == 100 else move_every,
            "accept_small_range": accept_small_range or None,
        }
        if unused := [name for name, value in asked.items() if value is not None]:
            raise ValueError(
                f"constrain: {', '.join(unused)} belong to lipschitz= or largest_logit=, which are None; pass "
                "lipschitz=10.0"
            )
        if constraints is None:
            raise ValueError(
                "constrain: nothing says what to keep; pass {'*': HardCap(1.0)}, or lipschitz=10.0 and example_input="
            )
        return attach(inner, constraints, norms_of(inner, norms), prove)
    from wellnormed.certificates.budget import constrain_to  # with what captures programs, which caps do without
    from wellnormed.certificates.certifying import domain_from

    given, domain = {} if constraints is None else constraints, domain_from("constrain", radius, box)
    ((what, most),) = numbers.items()
    return constrain_to(
        inner, given, norms, prove, what, most, example_input, domain, output, move_every, accept_small_range
    )
