"""One readable program per task, and the notebooks that read finished runs."""

import pkgutil

# With an installed ztk, programs of your own may lie in an `experiments/` folder, too.
__path__ = pkgutil.extend_path(__path__, __name__)
