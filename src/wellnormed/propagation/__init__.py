"""From executed operations to the rows of a proof: what a certificate and a user's own operations are made with."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "Box": "wellnormed.program.domain",
        "Ledger": ".ledger",
        "Stored": ".ledger",
        "UncertifiableError": "wellnormed.program.errors",
        "inner_axes": ".axes",
        "operation": "wellnormed.program.operation",
    },
)
