"""The one error of this room."""


class UncertifiableError(ValueError):
    """The model does something that has no bound; names the operation, the module, the line of the model, a remedy."""
