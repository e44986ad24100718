"""Certificates: capture what a model executes, bound it, search from below, write files and prove them again."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "Certificate": ".certificate",
        "CheckError": "wellnormed.proof",
        "Claim": "wellnormed.proof",
        "LowerBound": ".search",
        "Report": "wellnormed.proof",
        "Row": "wellnormed.proof",
        "UncertifiableError": "wellnormed.program.errors",
        "certify": ".certifying",
        "largest_entries": ".formats",
        "largest_rms": ".sizes",
        "lower_bound": ".search",
        "number_formats": ".formats",
        "require_same_model": ".verifying",
        "verify": ".verifying",
    },
)
