"""Runs at the start of Python if this folder is on the path: adjusts Hugging Face's libraries before they import `deepspeed`.

Another sitecustomize that this one hides runs afterwards.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

if importlib.util.find_spec("ztk") is not None:  # false in another interpreter that inherited the path
    from ztk.hf import watch

    watch()

_others = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
_spec = PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
