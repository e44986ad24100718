"""The kernel: the only place where a bound is derived. It imports NumPy and the standard library, nothing else.

`Proof.add` checks a row and returns its result with the bounds that follow; nothing else can make one. `certify` adds
rows while it lowers a model's operations. `check(document, tensors)`, `check_folder(folder)` and the command
`wellnormed-proof FOLDER` (or `python -P -m wellnormed.proof FOLDER`) add the rows of a stored certificate again. They
believe nothing but that the rows describe the model, and that computed tensors beside a certificate are what the model
computes.

To read it in an evening, begin with the records (`rows`) and the results (`value`, `moves`). Go on with the bounds of
any groups (`gather`), one rule of `rules` with the checks of `inference`, then `products` and `attention`; after that
the claims (`claims`) over `matrices` or over `promises`. End with `proof`, which puts all this together, and `check`.
"""

from wellnormed.proof.check import Report as Report
from wellnormed.proof.check import check as check
from wellnormed.proof.check import check_folder as check_folder
from wellnormed.proof.check import conclude as conclude
from wellnormed.proof.check import read_row as read_row
from wellnormed.proof.gather import gather as gather
from wellnormed.proof.promises import Parts as Parts
from wellnormed.proof.promises import Promise as Promise
from wellnormed.proof.promises import read_promise as read_promise
from wellnormed.proof.proof import Proof as Proof
from wellnormed.proof.reading import CheckError as CheckError
from wellnormed.proof.rows import Bounds as Bounds
from wellnormed.proof.rows import Claim as Claim
from wellnormed.proof.rows import Row as Row
from wellnormed.proof.value import Base as Base
from wellnormed.proof.value import Term as Term
from wellnormed.proof.value import Value as Value
