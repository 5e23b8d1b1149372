"""`import deepspeed_chat` where this folder is on the path, as under `python -m ztk.deepspeed`: ztk takes the name, unless the script has a
package of that name itself."""

import sys

from ztk.deepspeed.names import install
from ztk.deepspeed.names.tree import module_of

install()
sys.modules[__name__] = module_of(__name__)
