"""Two warm separate ranks in which `deepspeed` is ztk before transformers is imported."""

import pytest

from tests.hf import small
from tests.ranks import RankPool


@pytest.fixture(scope="session")
def hf():
    """`hf(function, **kwargs)` runs `function(**kwargs)` on two ranks as a launcher would have started it, and returns both results."""
    pool = RankPool(2)
    yield lambda function, **kwargs: pool.run(small.as_script, script=function, arguments=kwargs)
    pool.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A Llama of 4 files, randomly initialised, and its tokenizer."""
    return str(small.save_model(tmp_path_factory.mktemp("model")))
