"""Certificates: lower a program to rows of a proof, search from below, write files and prove them again.

`operation` registers the bound of an operation of your own.
"""

from wellnormed._lazy import lazy_namespace
from wellnormed.certificates import operations as operations  # registers the bounds of operations

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "Bound": ".sizes",
        "Box": "wellnormed.program.domain",
        "Certificate": ".certificate",
        "CheckError": "wellnormed.proof",
        "Ledger": ".ledger",
        "LowerBound": ".search",
        "Report": "wellnormed.proof",
        "Row": "wellnormed.proof",
        "Stored": ".ledger",
        "UncertifiableError": "wellnormed.program.errors",
        "Calibration": ".calibrating",
        "calibrate": ".calibrating",
        "capture": "wellnormed.program.capturing",
        "certify": ".certifying",
        "constrain": ".constraining",
        "inner_axes": ".axes",
        "largest_entries": ".observing",
        "lower_bound": ".search",
        "number_formats": ".formats",
        "operation": "wellnormed.program.operation",
        "require_same_model": ".verifying",
        "shown": "wellnormed.proof.decimals",
        "verify": ".verifying",
    },
)
