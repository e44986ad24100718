import numpy as np
import pytest
from safetensors.numpy import save

from wellnormed.certificates.safetensors_file import read_safetensors

CONTENT = save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(1, dtype=np.int64)}, {"note": "x"})
HEADER = 8 + int.from_bytes(CONTENT[:8], "little")


def damaged():
    for length in range(len(CONTENT)):
        yield CONTENT[:length]
    for place in range(HEADER):
        for bit in range(8):
            changed = bytearray(CONTENT)
            changed[place] ^= 1 << bit
            yield bytes(changed)
    for header in (b"[]", b"3", b'{"a": 3}', b'{"a": {"dtype": [], "shape": 1, "data_offsets": null}}', b"[" * 10**5):
        yield len(header).to_bytes(8, "little") + header
    yield CONTENT + b"\0"


def test_damage_is_a_value_error_that_names_the_file(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(CONTENT)
    intact = read_safetensors(path)
    np.testing.assert_array_equal(intact["a"].array(), np.arange(6).reshape(2, 3))
    refusals = []
    for content in damaged():
        path.write_bytes(content)
        try:
            found = read_safetensors(path)
        except ValueError as error:
            refusals.append(str(error))
        else:  # another name, another dtype of the same size, or another note: the digests of a certificate see these
            assert [len(t.content) for t in found.values()] == [len(t.content) for t in intact.values()]
    assert len(refusals) > len(CONTENT) + 4 * HEADER
    assert all(str(path) in refusal for refusal in refusals)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"w\.safetensors"):
        read_safetensors(tmp_path / "w.safetensors")
