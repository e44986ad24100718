"""The one book of operations: what an operation does to a value, written once for certificates and modular duality."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "Base": ".value",
        "Bounds": ".value",
        "Box": ".domain",
        "Claim": ".rows",
        "Ledger": ".ledger",
        "Row": ".rows",
        "Stored": ".ledger",
        "UncertifiableError": ".errors",
        "Value": ".value",
        "operation": ".registry",
        "primitive": ".registry",
    },
)
