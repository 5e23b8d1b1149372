"""One readable program per task, and the notebooks that read finished runs."""

import pkgutil

# With an installed ztk, your own programs may also be in a folder `experiments/`.
__path__ = pkgutil.extend_path(__path__, __name__)
