"""Certificates: bound the executed model, prove it, search from below, write and check files."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "Bound": ".bound",
        "Certificate": ".certificate",
        "Claim": ".certificate",
        "LowerBound": ".search",
        "Recorder": ".recorder",
        "Row": ".certificate",
        "UncertifiableError": ".recorder",
        "VerificationError": ".verification",
        "VerificationReport": ".verification",
        "certify": ".walker",
        "function_rule": ".rules",
        "lower_bound": ".search",
        "rule": ".rules",
        "verify": ".verification",
    },
)
