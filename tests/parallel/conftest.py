import pytest

from tests.parallel.processes import Processes


@pytest.fixture(scope="session")
def _pool():
    pool = {}
    yield pool
    for processes in pool.values():
        if processes.alive:
            processes.stop()


@pytest.fixture
def processes(_pool):
    """From a number of processes, those processes."""

    def get(world):
        if world not in _pool or not _pool[world].alive:
            _pool[world] = Processes(world)
        return _pool[world]

    return get
