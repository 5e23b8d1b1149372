"""Makes `import deepspeed` load ztk if this folder is on the path, as under `python -m ztk.deepspeed`.

`importlib.metadata` reads the folder next to it. Every process that inherits PYTHONPATH finds both, including data loader workers,
`accelerate launch` and scripts that start scripts.
"""

from ztk.deepspeed.names import install

install()
