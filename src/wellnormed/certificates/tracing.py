"""The modular tree of a model that no rule describes: its sensitivities are bounds of the kernel."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

from torch import nn

from wellnormed._devices import default_on_cpu
from wellnormed._modes import without_autocast
from wellnormed._warnings import warn
from wellnormed.certificates.arguments import domain_from, example_of, unwrapped
from wellnormed.certificates.sizes import group_size, slope
from wellnormed.certificates.within import Capped, Within, evaluated_on_cpu
from wellnormed.modular import Atom
from wellnormed.modular.builder import norms_of
from wellnormed.modular.tree import Network
from wellnormed.program.capturing import capture
from wellnormed.program.errors import UncertifiableError
from wellnormed.program.program import Program
from wellnormed.proof import Proof
from wellnormed.proof.decimals import float_up, root, rounding_up
from wellnormed.routing import Assignment

FAR = Decimal(2) ** 80
"""A change of one weight's result beside which no other change counts."""
STEEP = 1e4
"""The largest ratio of two factors of weights of one mass that goes without a warning."""
ACTING = frozenset({"input", "linear", "convolution", "scaling", "shift", "elementwise"})
"""Rows whose result is linear in each of their weights, but for biases and tables, which are added and looked up."""


@default_on_cpu()
def traced_tree(
    model: nn.Module,
    example_input: Any,
    assignment: Assignment | None = None,
    *,
    radius: float = 1.0,
    box: tuple[float, float] | None = None,
    output: str | int | None = None,
) -> Network:
    """Describe a model by what it executes, as `modular.modular_tree` does by the classes of its modules.

    The model may have a `forward` of its own, norm layers, residuals, attention: all that `certify` has bounds for. The
    sensitivity of what follows a weight is proved by the rows of a certificate, for all weights in the unit balls of
    their norms; it takes a proof for each weight, a second in all for a small transformer. As in MD, inputs of a weight
    count as having norm 1. A norm layer without a floor stretches small inputs by up to `1 / sqrt(eps)`, so that
    weights before it get hardly any step; a warning says so, and `wn.calibrate` puts floors under such layers.

    Args:
        model: The model, in evaluation mode for this, and left as it was. Frozen parameters keep their values.
        example_input: Arguments of a call of the model, as for `certify`; so are `radius`, `box` and `output`.
        assignment: The result of `assign_norms` for this model; made with its defaults if None.
        radius: Largest RMS of an input vector, token or sample.
        box: Lowest and highest entry of the input, instead of `radius`.
        output: Which tensor, if the model returns several.

    Returns:
        A tree of atoms of mass 1, for `optim.ModularDescent(model, tree=...)`; `with_masses` and `tare` change masses.

    Raises:
        UncertifiableError: An operation has no bound, or it is not known how a weight acts in it.
        ValueError: A trainable parameter has no norm, or the result does not depend on it.

    Example:
        >>> import torch
        >>> class Residual(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        ...     def forward(self, x):
        ...         return x + 0.5 * self.b(torch.relu(self.a(x)))
        >>> tree = traced_tree(Residual(), torch.zeros(1, 4))
        >>> print(tree)
        module        mass  sensitivity  share    lr factor  norm
        Residual      2     1.5          100.00%
        ├─ a.weight   1     1            50.00%   1          Spectral(...)
        └─ b.weight   1     1            50.00%   1          Spectral(...)
    """
    model, domain = unwrapped(model), domain_from("traced_tree", radius, box)
    norms = norms_of("traced_tree", model, assignment)
    owner = {alias: norms[p][0] for alias, p in model.named_parameters(remove_duplicate=False) if p in norms}
    proofs: list[Proof] = []
    with evaluated_on_cpu(model) as evaluated, without_autocast():

        def bound(program: Program) -> None:
            capped = {}
            for parameter, (name, norm) in norms.items():
                if aliases := tuple(alias for alias in program.stored if owner.get(alias) == name):
                    capped[name] = Capped(norm, tuple(parameter.shape), aliases)
            within = Within(program, evaluated, domain, capped, {})
            proofs.append(within.proof(dict.fromkeys(capped, 1.0) | within.tables()))

        capture(evaluated, example_of(evaluated, example_input, "traced_tree"), output, domain=domain, accept=bound)
    proof = proofs[-1]
    following: dict[str, float] = {}
    for row in proof.rows.values():
        weights = {owner[name] for claim in row.claims for name in claim.tensors if name in owner}
        if not weights or row.operation == "attention" or "/" in row.name:  # which name weights of linear rows again
            continue
        if row.operation not in ACTING:
            raise UncertifiableError(
                f"{row.name}: how far a step of {' and '.join(sorted(weights))} moves the result of {row.operation} is "
                "not known; freeze it, or build the tree by hand from `modular.Atom` and `modular.Bond`"
            )
        after = _sensitivity(proof, row.name)
        following |= {name: max(after, following.get(name, 0.0)) for name in weights}
    if missing := [name for name, _ in norms.values() if name not in following]:
        raise ValueError(
            f"traced_tree: how far a step of {', '.join(missing)} moves the result is not known: it is added to logits "
            "of attention, or the result does not depend on it; freeze it"
        )
    atoms = tuple(Atom(name, norm) for name, norm in norms.values())
    tree = Network(atoms, type(model).__name__, tuple(following[atom.name] for atom in atoms), _sensitivity(proof))
    factors = tree.lr_factors()
    steep = min(factors, key=lambda name: factors[name], default="")
    if steep and (ratio := max(factors.values()) / factors[steep]) > STEEP:
        warn(
            f"traced_tree: the sensitivity of what follows {steep} is {following[steep]:.3g}, so that it "
            f"moves {ratio:.3g} times less than another weight. Norm layers without a floor, "
            "attention of vectors longer than 1, and residuals that add multiply it; give shares by tree.with_masses, "
            "or take an optimizer that needs no tree, such as wn.Scion"
        )
    return tree


def _sensitivity(proof: Proof, of: str | None = None) -> float:
    """The largest change of the result, from RMS to RMS, by a change of the row `of`, or of the input without it.

    The rows are proved again with a change of that row beside which no other counts. Attention counts queries, keys and
    values one by one, as its joint bounds look through them.
    """
    again, rows = proof.again(proof.promises), list(proof.rows.values())
    with rounding_up():
        far = FAR * (1 + max(row.bounds.gain.max() for row in rows if row.bounds is not None))
    for row in rows:
        bounds = None
        if of is not None and row.bounds is not None and (row.name == of or row.name.startswith(f"{of}/")):
            with rounding_up():
                change = far * root(group_size(again.rows.get(of, row)))
                bounds = row.bounds._replace(gain=row.bounds.gain + change)
        if row.operation == "attention":
            row = replace(row, inputs=row.inputs[:3], reads=row.reads[:3], claims=())
        again.add(replace(row, bounds=bounds))
    last = list(again.rows.values())[-1]
    with rounding_up():
        return float_up(slope(last, group_size(last)) / (1 if of is None else far))
