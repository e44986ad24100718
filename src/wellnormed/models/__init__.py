"""Models made of Lipschitz layers, a config beside each, `load` for what training left, and `export`."""

from typing import TYPE_CHECKING

from wellnormed._lazy import lazy_namespace

if TYPE_CHECKING:
    from wellnormed.models.config import GPTConfig as GPTConfig
    from wellnormed.models.config import NanoGPTConfig as NanoGPTConfig
    from wellnormed.models.config import PotentialConfig as PotentialConfig
    from wellnormed.models.exporting import export as export
    from wellnormed.models.files import build as build
    from wellnormed.models.files import load as load
    from wellnormed.models.gpt import GPT as GPT
    from wellnormed.models.nanogpt import NanoGPT as NanoGPT
    from wellnormed.models.potential_gpt import PotentialGPT as PotentialGPT
else:
    __getattr__, __dir__ = lazy_namespace(__name__)
