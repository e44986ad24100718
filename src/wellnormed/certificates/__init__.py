"""Certificates: certify, search from below, write files and prove them again, caps that keep a constant.

`operation` registers the bound of an operation of your own.
"""

from wellnormed._lazy import lazy_namespace
from wellnormed.lowering import operations as operations  # registers the bounds of operations

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "Bound": ".sizes",
        "Box": "wellnormed.program.domain",
        "Certificate": ".certificate",
        "CheckError": "wellnormed.proof",
        "Ledger": "wellnormed.lowering.ledger",
        "LowerBound": ".search",
        "Report": "wellnormed.proof",
        "Row": "wellnormed.proof",
        "Stored": "wellnormed.lowering.ledger",
        "UncertifiableError": "wellnormed.program.errors",
        "Calibration": ".calibrating",
        "calibrate": ".calibrating",
        "capture": "wellnormed.program.capturing",
        "certify": ".certifying",
        "constrain": ".constraining",
        "inner_axes": "wellnormed.lowering.axes",
        "largest_entries": ".observing",
        "lower_bound": ".search",
        "number_formats": ".formats",
        "operation": "wellnormed.program.operation",
        "require_same_model": ".verifying",
        "shown": "wellnormed.proof.decimals",
        "verify": ".verifying",
    },
)
