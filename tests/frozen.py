"""The last module that the interpreter of `tests.ranks.forkserver` imports: its forks share the imported modules without copying them.

Collections in a fork would write to each imported object. Torch's operators would be removed one by one when a fork ends.
"""

import gc
import weakref

for finalizer in list(weakref.finalize._registry):
    finalizer.atexit &= finalizer.peek()[1].__name__ != "_del_library"
gc.collect()
gc.freeze()
