"""The kernel: the only place where a bound is derived. It imports NumPy and the standard library, nothing else.

`Proof.add` checks a row and returns its result with the bounds that follow; nothing else can make one. `certify` adds
rows while it lowers a model's operations. `check(folder)`, `check(document, tensors)` and the command
`wellnormed-proof FOLDER` (or `python -P -m wellnormed.proof FOLDER`) add the rows of a stored certificate again. They
believe nothing but that the rows describe the model, and that computed tensors beside a certificate are what the model
computes.

To read it in an evening, begin with the records (`rows`) and the results (`value`, `moves`). Go on with the bounds of
any groups (`gather`), one rule of `rules` with the checks of `inference`, then `products` and `attention`; after that
the claims (`claims`) over `matrices` or over `promises`. End with `proof`, which puts all this together, and `check`.
"""

from wellnormed.proof.check import Report, check
from wellnormed.proof.promises import Promise
from wellnormed.proof.proof import Proof
from wellnormed.proof.reading import CheckError
from wellnormed.proof.rows import Bounds, Claim, Row

__all__ = ["Bounds", "CheckError", "Claim", "Promise", "Proof", "Report", "Row", "check"]
