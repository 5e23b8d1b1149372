"""Python runs this when it starts, where this folder is on the path: Hugging Face's libraries ask what ztk completes in them before any of
them imports `deepspeed`.

Another sitecustomize that this one stands in front of runs after it, as it would have without this folder.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

if importlib.util.find_spec("ztk") is not None:  # not in another interpreter that inherited the path
    from ztk.hf import watch

    watch()

_others = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
_spec = PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
