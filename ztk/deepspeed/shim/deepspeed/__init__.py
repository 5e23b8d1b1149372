"""`import deepspeed` where this folder is on the path, as under `python -m ztk.deepspeed`: ztk takes the name.

The folder beside it is what `importlib.metadata` reads. Both are found by every process that inherits PYTHONPATH, so workers of a
data loader, `accelerate launch` and scripts that start scripts see the name, too.
"""

from ztk.deepspeed.names import install

install()
