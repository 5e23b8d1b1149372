"""Two ranks of their own: in them `import deepspeed` is ztk."""

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def documents():
    """`documents.run(function, ...)`, see `tests.ranks`."""
    pool = RankPool(2)
    yield pool
    pool.close()
