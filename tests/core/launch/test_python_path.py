"""PYTHONPATH of a rank."""

import os
from pathlib import Path

from ztk.core.launch import python_path


def test_ranks_find_ztk_and_not_its_packages_by_bare_names():
    """With ztk/ itself on the path `kernels`, which transformers looks for, would be ztk's."""
    first, _, _ = python_path().partition(os.pathsep)
    assert Path(first, "ztk", "worker.py").is_file() and not Path(first, "kernels").exists()
