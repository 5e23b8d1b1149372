"""python -m ztk.serve pack FOLDER OUT [--weights int4 [--calibration TEXT]]: packs a model once, for runs with offload=nvme."""

import argparse
import sys

from ztk.checkpoint import CheckpointError
from ztk.core.policies.inference import WEIGHTS
from ztk.serve.packing import pack_model


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 2 if the model cannot be packed."""
    parser = argparse.ArgumentParser(prog="python -m ztk.serve")
    packing = parser.add_subparsers(required=True).add_parser(
        "pack", help="pack a model's weights, one layer at a time"
    )
    packing.add_argument("folder", help="a run folder, a checkpoint, or a folder that transformers reads")
    packing.add_argument("out", help="a new folder, on the disk from which layers are read")
    packing.add_argument("--weights", choices=WEIGHTS, default="stored", help="the format (default: stored, fp32)")
    packing.add_argument("--ema", action="store_true", help="the moving average of the weights")
    packing.add_argument("--calibration", help="with int4, a text, jsonl or parquet file that chooses the weights")
    given = parser.parse_args(arguments)
    try:
        options = {"weights": given.weights, "ema": given.ema, "calibration": given.calibration}
        packed = pack_model(given.folder, to=given.out, **options)
    except (ValueError, CheckpointError) as error:
        print(f"ztk: {error}", file=sys.stderr)
        return 2
    layers = packed.description.layers
    print(
        f"{packed.path}: {layers} layers of {packed.layer_bytes} bytes, {packed.rest_bytes} bytes of others; use weights={packed.weights}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
