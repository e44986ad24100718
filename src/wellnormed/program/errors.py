"""`UncertifiableError`, and the context manager that turns other errors into it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

DRAWS = "it draws random numbers; call `model.eval()`, and take noise out"
OVERWRITES = (
    "the model overwrites {} while it runs; write the result elsewhere, or call `model.eval()` if it is a running "
    "statistic"
)


class UncertifiableError(ValueError):
    """The model has no bound. The message names the operation, the module, the line of the model, and a remedy."""


@contextmanager
def refusing(sentence: Callable[[Exception], str]) -> Iterator[None]:
    """Raise an `UncertifiableError` instead of any other error of the block.

    Args:
        sentence: The error -> the new message: the problem of the model, and its remedy.
    """
    try:
        yield
    except UncertifiableError:
        raise
    except Exception as error:  # what the model's own code raises, or torch on its behalf, may be anything
        raise UncertifiableError(sentence(error)) from error
