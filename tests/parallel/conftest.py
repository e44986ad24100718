import pytest

from tests.parallel.processes import Processes


@pytest.fixture(scope="session")
def processes():
    """From a number of processes, those processes."""
    pool = {}

    def get(world):
        if world not in pool or not pool[world].alive:
            pool[world] = Processes(world)
        return pool[world]

    yield get
    for running in pool.values():
        if running.alive:
            running.stop()
