"""The model of `pytest -m real`, and its answers by transformers."""

from pathlib import Path

import pytest

from tests.real.model import default_folder


@pytest.fixture(scope="session")
def folder() -> Path:
    """SmolLM2-135M-Instruct; without it tests fail, since they were asked for."""
    found = default_folder()
    if not (found / "config.json").is_file():
        pytest.fail(f"the real model is missing: python scripts/get_model.py smollm2 {found} (or set ZTK_REAL_MODEL)")
    return found
