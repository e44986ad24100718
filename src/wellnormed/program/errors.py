"""The one error of this room, and the one place where other errors become it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

DRAWS = "it draws random numbers; call `model.eval()`, and take noise out"


class UncertifiableError(ValueError):
    """The model does something that has no bound; names the operation, the module, the line of the model, a remedy."""


@contextmanager
def refusing(sentence: Callable[[Exception], str]) -> Iterator[None]:
    """Raise an `UncertifiableError` in the place of any other error of the block.

    Args:
        sentence: The error -> what it says about the model, and what to do about that.
    """
    try:
        yield
    except UncertifiableError:
        raise
    except Exception as error:  # what the model's own code raises, or torch on its behalf, may be anything
        raise UncertifiableError(sentence(error)) from error
