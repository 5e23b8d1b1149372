"""Makes `import deepspeed_chat` load ztk if this folder is on the path, as under `python -m ztk.deepspeed`, unless the script has its own
package of that name.
"""

import sys

from ztk.deepspeed.names import install
from ztk.deepspeed.names.tree import module_of

install()
sys.modules[__name__] = module_of(__name__)
