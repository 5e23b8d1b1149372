"""Checks, describes, exports and imports checkpoints. Exit codes: 0 success, 1 a damaged checkpoint, 2 wrong usage."""

import argparse
import os
import sys

from ztk.checkpoint.convert import import_checkpoint
from ztk.checkpoint.errors import CheckpointError
from ztk.checkpoint.errors import describe as describe_error
from ztk.checkpoint.export import (
    SHARD_BYTES,
    export_adapter,
    export_safetensors,
    export_state_dict,
    export_torch_distributed,
)
from ztk.checkpoint.folder import resolve
from ztk.checkpoint.gguf.writing import KINDS, export_gguf
from ztk.checkpoint.manifest import read_manifest
from ztk.checkpoint.verify import describe, verify_all
from ztk.core.precision.names import DTYPES

_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_DIR = "a checkpoint, a folder of checkpoints, a run folder, or a folder of tags written by a DeepSpeed script"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code = options.command(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CheckpointError, OSError) as error:
        print(describe_error(error), file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ztk.checkpoint", description=__doc__.partition("Exit codes")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    verify = commands.add_parser("verify", help="read every byte and check it")
    verify.add_argument("dir", help=f"{_DIR}; all checkpoints in it are checked")
    verify.set_defaults(command=_verify)

    show = commands.add_parser("show", help="print the content of a checkpoint")
    show.add_argument("dir", help=_DIR)
    show.add_argument("--parameters", action="store_true", help="list them")
    show.set_defaults(command=_show)

    export = commands.add_parser("export", help="write the weights in another format")
    export.add_argument("dir", help=f"{_DIR}; with --format gguf also a folder of transformers")
    export.add_argument(
        "to", help="a new folder for safetensors files, or a new file: FILE.pt for a state_dict, FILE.gguf"
    )
    kind = export.add_mutually_exclusive_group()
    kind.add_argument("--format", choices=("gguf",), help="one file for llama.cpp, with tokenizer and chat template")
    kind.add_argument(
        "--torch-distributed", action="store_true", help="a torch.distributed.checkpoint folder, optimizer states too"
    )
    kind.add_argument("--adapter", action="store_true", help="only the weights and configuration of a peft adapter")
    kind.add_argument(
        "--own-names",
        action="store_true",
        help="keep the names of a native decoder; without it the decoder becomes a LlamaForCausalLM",
    )
    export.add_argument("--kind", choices=KINDS, help="with --format gguf: how matrices are stored (default: F16)")
    export.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights; default: the model's compute dtype")
    export.add_argument(
        "--ema", action="store_true", help="export the moving average of the weights (runs with ema.decay)"
    )
    export.add_argument(
        "--shard-bytes", type=int, default=SHARD_BYTES, help="largest size of one safetensors file (%(default)s)"
    )
    export.set_defaults(command=_export)

    bring = commands.add_parser(
        "import", help="make a checkpoint of safetensors, a state_dict or torch.distributed.checkpoint"
    )
    bring.add_argument("dir", help="a folder or file in that format")
    bring.add_argument("to", help="a folder of checkpoints")
    bring.add_argument(
        "--rename", nargs=2, action="append", default=[], metavar=("PATTERN", "NAME"), help="may be repeated"
    )
    bring.add_argument("--decoder", action="store_true", help="make a Llama of transformers a native decoder")
    bring.set_defaults(command=_import)
    return parser


def _verify(options: argparse.Namespace) -> int:
    reports = verify_all(options.dir)
    for report in reports:
        rate = report.nbytes / 1e9 / max(report.seconds, 1e-9)
        state = f"{len(report.faults)} faults" if report.faults else "complete"
        print(f"{report.path}: {state}, {report.nbytes / 1e6:.1f} MB in {report.seconds:.2f} s ({rate:.2f} GB/s)")
        for fault in report.faults:
            print(f"  {fault}")
    return int(any(report.faults for report in reports))


def _show(options: argparse.Namespace) -> int:
    print(describe(read_manifest(resolve(options.dir)), with_parameters=options.parameters))
    return 0


def _export(options: argparse.Namespace) -> int:
    dtype = DTYPES[_DTYPES[options.dtype]] if options.dtype else None
    if options.kind and options.format != "gguf":
        raise ValueError(f"--kind {options.kind} has no effect without --format gguf: add it, or leave --kind out")
    if options.format == "gguf":
        if options.dtype:
            raise ValueError("--dtype has no effect with --format gguf: use --kind BF16, F16 or another")
        report = export_gguf(options.dir, to=options.to, kind=options.kind or "F16", ema=options.ema)
        print(f"{report.path}: {report.nbytes / 1e6:.1f} MB, {options.kind or 'F16'}, from {options.dir}")
        return 0
    if options.torch_distributed:
        if options.dtype:
            raise ValueError("--dtype has no effect with --torch-distributed, which keeps fp32: leave one out")
        if options.ema:
            raise ValueError(
                "--ema has no effect with --torch-distributed, which keeps weights and states: leave one out"
            )
        report = export_torch_distributed(options.dir, to=options.to)
    elif options.adapter:
        report = export_adapter(options.dir, to=options.to, dtype=dtype, ema=options.ema)
    elif options.to.endswith((".pt", ".bin")):
        report = export_state_dict(options.dir, to=options.to, dtype=dtype, ema=options.ema)
    else:
        report = export_safetensors(
            options.dir,
            to=options.to,
            dtype=dtype,
            shard_bytes=options.shard_bytes,
            own_names=options.own_names,
            ema=options.ema,
        )
    print(f"{report.path}: {report.nbytes / 1e6:.1f} MB in {report.files} files, from {resolve(options.dir)}")
    return 0


def _import(options: argparse.Namespace) -> int:
    path = import_checkpoint(options.dir, to=options.to, rename=dict(options.rename), as_decoder=options.decoder)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
