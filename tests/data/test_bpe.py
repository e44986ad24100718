"""GPT-2's tokenizer is the published one, and where it cannot be had one sentence says what to do."""

import sys

import pytest

from wellnormed.data import _download, bpe

WORDS = {
    "hello world": [31373, 995],
    "Hello, I'm a  test\n\nof GPT-2.": [15496, 11, 314, 1101, 257, 220, 1332, 198, 198, 1659, 402, 11571, 12, 17, 13],
    "naïve Ω 日本": [2616, 38776, 7377, 102, 10545, 245, 98, 17312, 105],
}


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tiktoken")
    if not any(path.exists() for path in _download.places(bpe.FILE)):
        pytest.skip(f"no {bpe.FILE} in $WELLNORMED_DATA or in the cache")
    return bpe.gpt2_tokenizer()


@pytest.fixture
def nothing_here(tmp_path, monkeypatch):
    monkeypatch.setenv("WELLNORMED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "tiktoken", sys)  # that it is installed; it is not reached
    return tmp_path


@pytest.mark.parametrize("text", WORDS)
def test_known_texts_have_their_tokens(tokenizer, text):
    assert tokenizer.encode_ordinary(text) == WORDS[text]
    assert tokenizer.decode(WORDS[text]) == text


def test_it_is_what_tiktoken_makes_of_both_files(tokenizer, monkeypatch):
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    path = next(path for path in _download.places(bpe.FILE) if path.exists())
    if not path.with_name("vocab.bpe").exists():
        pytest.skip("only encoder.json is here")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # which reads the files and leaves no copies
    ranks = data_gym_to_mergeable_bpe_ranks(str(path.with_name("vocab.bpe")), str(path))
    assert tokenizer._mergeable_ranks == ranks
    assert tokenizer.n_vocab == bpe.VOCABULARY
    assert tokenizer.eot_token == bpe.END_OF_TEXT


def test_without_tiktoken_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[tokenizer\]'"):
        bpe.gpt2_tokenizer.__wrapped__()


def test_a_damaged_file_is_refused(nothing_here):
    path = nothing_here / "data" / bpe.FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"encoder\.json is not .* remove it, and it is downloaded"):
        bpe.gpt2_tokenizer.__wrapped__()


def test_without_a_network_the_places_of_the_file_are_named(nothing_here, monkeypatch):
    monkeypatch.setattr(bpe, "URL", "http://127.0.0.1:9/encoder.json")  # nothing listens there
    with pytest.raises(ValueError, match=r"could not be downloaded .* set WELLNORMED_DATA .* gpt2_bpe/encoder\.json"):
        bpe.gpt2_tokenizer.__wrapped__()
