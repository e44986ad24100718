import pytest

from papers import _gpt, _nanogpt, _shakespeare
from wellnormed.data import corpus
from wellnormed.data.characters import CharacterText


@pytest.fixture
def line(monkeypatch):
    """A line, which stands for all of Shakespeare."""
    text = CharacterText("To be, or not to be, that is the question:\n" * 20, "a line")
    for module in (_gpt, _nanogpt, _shakespeare):
        monkeypatch.setattr(module, "shakespeare", lambda: text)
    monkeypatch.setattr(corpus, "load_shakespeare", lambda source: text)
    return text
