"""The last module that the interpreter of `tests.ranks.forkserver` imports: its forks share the imported modules without copying them.

Collections in a fork would write to each imported object. Torch's operators would be removed one by one when a fork ends. A first
configuration takes twice as long as a second.
"""

import gc
import weakref

from tests.composing import speed_up_hydra
from ztk.config import Machine, compose, from_yaml, to_yaml

speed_up_hydra()
from_yaml(to_yaml(compose(output_dir=".", machine=Machine(gpus=0, cores=1))))  # types, parsers and plugins stay

for finalizer in list(weakref.finalize._registry):
    finalizer.atexit &= finalizer.peek()[1].__name__ != "_del_library"
gc.collect()
gc.freeze()
