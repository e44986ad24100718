"""Models made of Lipschitz layers, a config beside each, `load` for what training left, and `export`."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "GPT": ".gpt",
        "GPTConfig": ".config",
        "NanoGPT": ".nanogpt",
        "NanoGPTConfig": ".config",
        "PotentialGPT": ".potential_gpt",
        "PotentialConfig": ".config",
        "build": ".files",
        "export": ".exporting",
        "load": ".files",
    },
)
