"""A script that ends without `destroy()`, also by an exception, is not aborted: 200 exits next to two busy processes per core."""

import subprocess
import sys
from pathlib import Path


def test_scripts_end_as_they_should(show, amount):
    done = subprocess.run(
        [sys.executable, "-m", "tests.slow.exits", "--exits", str(amount(200))],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines()[-6:]:
        show(line)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
