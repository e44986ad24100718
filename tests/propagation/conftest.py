import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `adversary`: tests are no package


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are too small to share among threads: one is several times faster than two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
