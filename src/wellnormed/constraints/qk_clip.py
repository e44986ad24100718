"""QK-clip: queries and keys of attention heads whose largest logit was too large are scaled down."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from wellnormed._inputs import require_flags, require_numbers
from wellnormed._ranges import POSITIVE
from wellnormed.constraints.base import Constraint, State
from wellnormed.norms import Norm


@dataclass(eq=False)
class QKClip(Constraint):
    """Scales the query and key weights of a head by `(max_logit / largest)^power` when its largest logit was above.

    The logits of a head are bilinear in its queries and keys, so at power 1/2 for both they are scaled by
    `max_logit / largest` (Kimi K2, algorithm 1). The logits are the caller's to give, with `record`, before every step;
    without a record nothing happens. One object serves the query and the key weights, and biases, of one attention
    layer. It promises nothing: it answers to the logits of the last batch, before the step.

    Args:
        max_logit: The threshold, 100 in the paper.
        power: 1 for queries whose keys are shared by several heads and are not to be scaled.
        fused: The weight holds queries, keys and values in this order along its first dimension; values stay.
        key_heads: The number of heads of keys in a fused weight, where it is not that of the queries. In weights of
            their own they are found by their rows. Keys that queries share are scaled by the largest of their logits.

    Example:
        >>> import torch, wellnormed as wn
        >>> q, k = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
        >>> clip = QKClip(max_logit=1.0)
        >>> optimizer = wn.Scion(torch.nn.ModuleDict({"q": q, "k": k}), lr=0.0)
        >>> _ = wn.constrain(optimizer, {"q": clip, "k": clip})
        >>> x, before = torch.randn(1, 5, 4), q.weight.detach().clone()
        >>> logits = 9 * torch.einsum("bthd,bshd->bhts", *(f(x).unflatten(-1, (2, 2)) for f in (q, k)))
        >>> clip.record(logits)
        >>> logits.sum().backward()
        >>> optimizer.step()
        >>> expected = (1.0 / logits.amax((0, 2, 3))).clamp(max=1.0).sqrt().repeat_interleave(2)
        >>> torch.allclose(q.weight, before * expected[:, None])
        True
    """

    acts_at_rest: ClassVar[bool] = True  # on a record, which a step that loads a state has not

    max_logit: float = 100.0
    power: float = 0.5
    fused: bool = False
    key_heads: int | None = None
    _rows: int = field(default=0, init=False, repr=False)  # of queries
    _recorded: Tensor | None = field(default=None, init=False, repr=False)
    _largest: Tensor | None = field(default=None, init=False, repr=False)
    _checked: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        self._require_positive(max_logit=self.max_logit, power=self.power)
        require_flags("QKClip: ", {"fused": self.fused})
        if self.key_heads is not None:
            require_numbers("QKClip: ", {"key_heads": self.key_heads}, POSITIVE, whole=True)
            if not self.fused:
                raise ValueError(
                    f"QKClip: key_heads={self.key_heads} is for a fused weight; leave it out, or pass fused"
                )

    @torch.no_grad()
    def record(self, logits: Tensor) -> None:
        """Give the logits before the softmax, `(*batch, heads, queries, keys)`; of several calls the largest count.

        Masked logits of minus infinity do not matter. In several processes, give the largest over all of them.
        """
        largest = logits.detach().amax((-2, -1))
        largest = largest.reshape(-1, largest.shape[-1]).amax(0)
        self._recorded = largest if self._recorded is None else torch.maximum(self._recorded, largest)

    def check(self, norm: Norm, update_norm: float | None, name: str) -> None:
        """Before every step: what was recorded since the last one counts, for all weights of the layer."""
        if self._recorded is not None or name in self._checked:
            self._largest, self._recorded, self._checked = self._recorded, None, set()
        self._checked.add(name)

    def acts_on(self, norm: Norm) -> bool:
        return norm.ndim in (1, 2)

    def initial_state(self, weights: Tensor, norm: Norm) -> State:
        self._rows = max(self._rows, weights.shape[-norm.ndim])
        return {}

    def apply(self, weights: Tensor, norm: Norm, update_norm: float | None, state: State) -> tuple[Tensor, State]:
        if self._largest is None:
            return weights, state
        heads, rows = len(self._largest), weights.shape[1]
        keys = self.key_heads or heads
        size, rest = divmod(rows if self.fused else self._rows, heads + 2 * keys if self.fused else heads)
        own = keys if self.fused else rows // max(size, 1)
        if rest or not own or heads % own or (not self.fused and own * size != rows):
            together = f"{heads} of queries and {keys} each of keys and values" if self.fused else f"{heads}"
            raise ValueError(
                f"QKClip: {heads} heads were recorded, but a weight has {rows} rows, and not those of {together}; "
                "record logits of shape (*batch, heads, queries, keys), and say key_heads of a fused weight"
            )
        factors = (self.max_logit / self._largest.clamp(min=self.max_logit)) ** self.power
        shared = factors.reshape(own, -1).amin(1)
        factors = torch.cat([factors, shared, torch.ones_like(shared)]) if self.fused else shared
        factors = factors.to(weights).repeat_interleave(size)
        return weights * factors.reshape(-1, *(1,) * (norm.ndim - 1)), state
