"""An environment with ztk's wheel and without the checkout."""

import os
import subprocess
import sys
import venv
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-index")


def start(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """A process without access to the checkout, unless `environment` contains its path."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=plain | environment, capture_output=True, text=True, timeout=300)


def install_wheel(folder: Path) -> Path:
    """Builds the wheel and installs it into a new environment below `folder`. Returns the environment's `bin` folder.

    Other libraries come from the tests' environment through a line in a .pth file. An editable ztk there has no effect, because .pth files
    that a .pth file adds are not read.
    """
    built = start(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", folder, CHECKOUT, cwd=folder)
    assert built.returncode == 0, built.stderr
    venv.create(folder / "venv", with_pip=False)
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "libraries.pth").write_text("\n".join(libraries) + "\n")
    (wheel,) = folder.glob("ztk-*.whl")
    done = start(*PIP, "--python", folder / "venv" / "bin" / "python", "install", *OFFLINE, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "venv" / "bin"
