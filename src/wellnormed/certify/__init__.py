"""Certificates: propagate a bound through the executed model, prove it, search from below, write and check files.

The package is itself callable: `wellnormed.certify(model)` stays the function after
`wellnormed.certify.rules` was imported.
"""

import sys
from types import ModuleType
from typing import Any

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


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        from wellnormed.certify.walker import certify

        return certify(*args, **keywords)


sys.modules[__name__].__class__ = _CallablePackage
