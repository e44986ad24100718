"""Models made of Lipschitz layers, a config beside each, and `load` for what training left."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "GPT": ".gpt",
        "GPTConfig": ".config",
        "PotentialGPT": ".potential_gpt",
        "PotentialConfig": ".config",
        "build": ".files",
        "export": ".files",
        "load": ".files",
    },
)
