"""`python -m deepspeed.checkpoint.ds_to_universal`: every checkpoint of ztk is universal, so the new folder has the same files.

    python -m deepspeed.checkpoint.ds_to_universal --input_folder checkpoints/global_step5 --output_folder checkpoints/global_step5_universal

Files are linked where the file system can, else copied, so that either folder may be removed.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

from ztk.checkpoint.errors import CheckpointError, describe
from ztk.checkpoint.folder import resolve
from ztk.checkpoint.manifest import read_manifest

LATEST = "latest_universal"  # next to the output folder, as in DeepSpeed


def parse_arguments(args: list[str] | None = None) -> argparse.Namespace:
    """Parses DeepSpeed's options."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description=__doc__.partition(".")[0])
    parser.add_argument("--input_folder", required=True, help="a tag's folder, such as checkpoints/global_step5")
    parser.add_argument("--output_folder", required=True, help="a new folder")
    nothing = "accepted; there is nothing to convert"
    for name in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(name, type=int, default=1, help=nothing)
    for name in ("--keep_temp_folder", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help=nothing)
    parser.add_argument("--no_strict", dest="strict", action="store_false", help=nothing)
    return parser.parse_args(args)


def main(args: argparse.Namespace) -> None:
    """Links or copies the files.

    Raises CheckpointError for a folder without a ztk checkpoint, and FileExistsError for an existing output folder.
    """
    source, target = Path(args.input_folder), Path(args.output_folder)
    try:
        read_manifest(resolve(source))
    except CheckpointError as error:
        raise CheckpointError(
            f"{source}: has no checkpoint of ztk ({describe(error)}); `python -m ztk.checkpoint import {source} FOLDER` makes one of "
            "DeepSpeed's own"
        ) from error
    shutil.copytree(source, target, copy_function=_link)
    (target.parent / LATEST).write_text(target.name, encoding="utf-8")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except (CheckpointError, OSError) as error:
        sys.exit(str(error))
