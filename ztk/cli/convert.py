"""Converts ds_config.json to the command line of `run.py`, and back.

python -m ztk.cli.convert ds_config.json [--ranks 8]      # one override per line; comments for settings without a key
python -m ztk.cli.convert --back zero=stage3 offload=cpu  # prints the ds_config.json of that run
"""

import argparse
import dataclasses
import json
import sys

from ztk.config import compose


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the exit code: 0, or 2 for an invalid configuration."""
    parser = argparse.ArgumentParser(prog="python -m ztk.cli.convert", description=__doc__.partition("\n")[0])
    parser.add_argument("--back", action="store_true", help="from run.py's overrides to ds_config.json")
    parser.add_argument("--ranks", type=int, help="how many ranks share train_batch_size (default: 1)")
    parser.add_argument("source", nargs="*", help="ds_config.json, or with --back the overrides")
    given = parser.parse_args(arguments)
    if not given.back and len(given.source) != 1:
        parser.error("give one ds_config.json")
    try:
        print(_ds_config(given.source) if given.back else _overrides(given.source[0], ranks=given.ranks))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _ds_config(overrides: list[str]) -> str:
    from ztk.deepspeed.config.convert import to_ds_config  # imports torch, which the other commands do not need

    return json.dumps(to_ds_config(dataclasses.asdict(compose(*overrides, output_dir="."))), indent=2)


def _overrides(path: str, *, ranks: int | None) -> str:
    from ztk.deepspeed.config import parse_config
    from ztk.deepspeed.config.convert import to_overrides

    found = to_overrides(parse_config(path, world_size=ranks or 1), ranks=ranks)
    return "\n".join([*found.words, *(f"# {note}" for note in found.notes)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
