"""Certificates: certify, search from below, write files and prove them again, caps that keep a constant.

`operation` registers the bound of an operation of your own.
"""

from typing import TYPE_CHECKING

from wellnormed._lazy import lazy_namespace
from wellnormed.lowering import operations as operations  # registers the bounds of operations

if TYPE_CHECKING:
    from wellnormed.certificates.calibrating import Calibration as Calibration
    from wellnormed.certificates.calibrating import calibrate as calibrate
    from wellnormed.certificates.certificate import Certificate as Certificate
    from wellnormed.certificates.certifying import certify as certify
    from wellnormed.certificates.constraining import constrain as constrain
    from wellnormed.certificates.formats import number_formats as number_formats
    from wellnormed.certificates.observing import largest_entries as largest_entries
    from wellnormed.certificates.search import LowerBound as LowerBound
    from wellnormed.certificates.search import lower_bound as lower_bound
    from wellnormed.certificates.sizes import Bound as Bound
    from wellnormed.certificates.tracing import traced_tree as traced_tree
    from wellnormed.certificates.verifying import require_same_model as require_same_model
    from wellnormed.certificates.verifying import verify as verify
    from wellnormed.lowering.axes import inner_axes as inner_axes
    from wellnormed.lowering.ledger import Ledger as Ledger
    from wellnormed.lowering.ledger import Stored as Stored
    from wellnormed.program.capturing import capture as capture
    from wellnormed.program.domain import Box as Box
    from wellnormed.program.errors import UncertifiableError as UncertifiableError
    from wellnormed.program.operation import operation as operation
    from wellnormed.proof import CheckError as CheckError
    from wellnormed.proof import Report as Report
    from wellnormed.proof import Row as Row
    from wellnormed.proof.arithmetic import Arithmetic as Arithmetic
    from wellnormed.proof.decimals import shown as shown
else:
    __getattr__, __dir__ = lazy_namespace(__name__)
