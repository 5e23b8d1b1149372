"""Runs all first checks on a new GPU machine with one command, prepared beforehand and without network access.

    python scripts/first_hour.py prepare FOLDER            # here: wheels that GPU machines often lack, compiled kernels, first.sh
    bash FOLDER/first.sh RESULTS                           # on the GPU machine, in the checkout: at most 560 s
    python scripts/first_hour.py read RESULTS              # here: writes experiments/results/GPU/first_hour.{json,md}
    python scripts/first_hour.py run RESULTS --dry-run     # every step on a CPU with small sizes
    python scripts/first_hour.py run RESULTS --set more    # one of the other sets, each in at most 560 s

Each step is a process group with its own time limit, so that a failure, a hang or a broken device costs one row. RESULTS has at most four
files, updated after each step: steps.jsonl, log.txt, kernels.json and tests.xml. The other sets add their rows: `more` (further steps on one
GPU), `training` (ztk and its peers with torch.compile, in three rounds), `peers` (kernels next to their fastest peers), `serving` (products
of prompts and of decoding, with a test of their bits), `offload` (the update in main memory alone and in training), `launch` (both launches
of kernels, in three rounds) and `several` (2 or more ranks). On one GPU the ranks of `several` share it, and their collectives use gloo;
FSDP2 and DDP are left out then.
`scripts/gpu_item.py` describes the steps.
"""

import base64
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import parser_of
from scripts.first_hour_page import read
from ztk.core.launch import allocator_settings

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS = 560.0  # of all steps
SLOWER = 10.0  # a dry run on a CPU that does other work, too
PYTHON, TRITON = "3.12", "3.6.0"  # of the GPU machine
PROGRAMS = "/tmp/first_hour_triton"  # Triton's cache there; its entries have absolute paths
# Packages that ztk imports and that machines with only torch, triton and einops lack.
WHEELS = ("hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.3")
KERNELS = ("attention", "adamw", "cross_entropy", "linear_rows")
COMPARED = ("attention", "adamw", "linear_cross_entropy", "rms_norm", "grouped_matmul")  # with serious peers
SERVED = ("linear_rows", "gated_rows", "paged_attention")  # of a decoding step, the first two of prompts, too
COMPILED = ("ztk0", "ztk0+compile", "plain+compile", "fsdp2+compile")
ROUNDS = 3  # in turns, so that a GPU's clock and temperature are the same for all
LAUNCHES = ("private", "public")  # of ZTK_LAUNCH
SETS = ("first", "more", "training", "peers", "serving", "offload", "launch", "several")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command with its limit in seconds. together: neighbours with the same number run at the same time; 0: alone."""

    name: str
    limit: float
    command: tuple[str, ...]
    together: int = 0


def item(*words: str, dry: bool, limit: float, together: int = 0, options: Sequence[str] = ()) -> Step:
    """A step that runs an item of `scripts/gpu_item.py`."""
    command = (sys.executable, "scripts/gpu_item.py", *words, "--device", "cpu" if dry else "cuda", *options)
    return Step(name=" ".join((*words, *options)), limit=limit, command=command, together=together)


def steps(*, dry: bool, work: Path, kind: str = "first") -> list[Step]:
    """The steps of a set, most important first. work: folder for temporary files."""
    match kind:
        case "more":
            made = more_steps(dry=dry)
        case "training":
            made = training_steps(dry=dry)
        case "peers":
            made = kernel_steps(COMPARED, minutes=1.5, dry=dry, work=work)
        case "serving":
            made = serving_steps(dry=dry, work=work)
        case "offload":
            made = offload_steps(dry=dry)
        case "launch":
            made = launch_steps(dry=dry)
        case "several":
            made = several_steps(dry=dry)
        case _:
            made = first_steps(dry=dry, work=work)
    return [replace(step, limit=step.limit * SLOWER) for step in made] if dry else made


def more_steps(*, dry: bool) -> list[Step]:
    """Further steps on one GPU."""
    contenders = ("plain", "plain+kernels", "ztk3", "ztk2+cpu")
    return [
        item("machine", dry=dry, limit=25),
        item("job", dry=dry, limit=240),
        item("overlap", "ztk2+cpu", dry=dry, limit=45),
        *(item("speed", contender, dry=dry, limit=60) for contender in contenders),
    ]


def training_steps(*, dry: bool) -> list[Step]:
    """Speed of compiled training, in rounds."""
    rounds = [(number, contender) for number in range(1, ROUNDS + 1) for contender in COMPILED]
    made = [item("speed", contender, dry=dry, limit=44) for _, contender in rounds]
    named = [replace(step, name=f"{step.name}, round {number}") for step, (number, _) in zip(made, rounds, strict=True)]
    return [item("machine", dry=dry, limit=25), *named]


def serving_steps(*, dry: bool, work: Path) -> list[Step]:
    """Answers and prompts: bits of rows in tiles of every size, times of decoding and prompts, and the products of both."""
    pytest = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        f"--junit-xml={work / 'tests.xml'}",
    )
    return [
        item("machine", dry=dry, limit=25),
        Step(name="tests of rows", limit=90, command=(*pytest, "tests/kernels/test_gpu.py", "-k", "rows")),
        item("answers", dry=dry, limit=30),
        item("decode", dry=dry, limit=60),
        *kernel_steps(SERVED, minutes=1.5, dry=dry, work=work),
    ]


def offload_steps(*, dry: bool) -> list[Step]:
    """The update in main memory alone, and training with it: with and without a profiler."""
    contenders = ("ztk3+cpu", "ztk3+cpu:0.5", "ztk2+cpu", "ztk2+cpu:0.5")
    return [
        item("machine", dry=dry, limit=25),
        item("host_update", dry=dry, limit=90),
        *(item("speed", contender, dry=dry, limit=60) for contender in contenders),
        *(item("overlap", contender, dry=dry, limit=60) for contender in contenders[:2]),
    ]


def launch_steps(*, dry: bool) -> list[Step]:
    """Training and eager decoding by both launches of kernels, in rounds; in the first one kernels are compiled."""
    made = [item("machine", dry=dry, limit=25)]
    for number in range(1, ROUNDS + 1):
        for launch in LAUNCHES:
            for name, limit in (("launches", 45), ("eager", 40)):
                step = item(name, dry=dry, limit=limit)
                command = ("env", f"ZTK_LAUNCH={launch}", *step.command)
                made.append(replace(step, name=f"{name} {launch}, round {number}", command=command))
    return made


def kernel_steps(ops: Sequence[str], *, minutes: float, dry: bool, work: Path) -> list[Step]:
    """A process for each op: ztk, then its peers, then eager torch and torch.compile."""
    bench = (sys.executable, "scripts/bench_kernels.py", "--minutes", str(minutes), *(["--dry-run"] if dry else []))
    limit = 60 * minutes + 20
    return [
        Step(name=f"kernels {op}", limit=limit, command=(*bench, "--to", str(work / op), "--ops", op)) for op in ops
    ]


def several_steps(*, dry: bool) -> list[Step]:
    """Steps on as many ranks as there are GPUs; on two ranks of one GPU, or of the CPU."""
    import torch  # late, because it takes seconds

    gpus = 0 if dry else torch.cuda.device_count()
    options = ("--ranks", str(max(2, gpus)), *(["--shared"] if gpus < 2 else []))
    peers = ("fsdp2", "ddp") if gpus > 1 else ()
    several = partial(item, dry=dry, options=options)
    return [
        item("machine", dry=dry, limit=25),
        *(several("identity", precision, limit=60) for precision in ("fp32", "bf16")),
        several("volume", limit=45),
        *(several("overlap", contender, limit=50) for contender in ("ztk1", "ztk3", "ztk3+cpu")),
        *(several("speed", contender, limit=35) for contender in ("ztk0", "ztk1", "ztk3", "ztk3+cpu", *peers)),
    ]


def first_steps(*, dry: bool, work: Path) -> list[Step]:
    """The steps of the first minutes."""
    one = partial(item, dry=dry)
    tests = ("tests/kernels/test_gpu.py", "tests/parallel/recompute/test_gpu.py")
    workers = ("-n", str(min(14, os.cpu_count() or 1))) if not dry else ()
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", *workers, "-p", "no:cacheprovider")
    return [
        one("machine", limit=25),
        Step(name="tests", limit=110, command=(*pytest, f"--junit-xml={work / 'tests.xml'}", *tests)),
        one("nccl", limit=110, together=1),
        *(one("identity", precision, limit=110, together=1) for precision in ("fp32", "bf16", "fp16")),
        *(one("memory", *row.split(), limit=110, together=1) for row in ("0 none", "1 none", "3 none", "2 cpu", "3 cpu")),
        one("answers", limit=30),
        one("decode", limit=30),
        *(one("speed", contender, limit=35) for contender in ("ztk0", "fsdp2")),
        one("overlap", "ztk3+cpu", limit=45),
        *kernel_steps(KERNELS, minutes=0.25, dry=dry, work=work),
    ]  # fmt: skip


def run(results: Path, *, dry: bool, only: Sequence[str], kind: str = "first") -> int:
    """Runs the steps and writes their rows. Returns the number of failed steps."""
    results.mkdir(parents=True, exist_ok=True)
    deadline, failed = time.monotonic() + SECONDS * (SLOWER if dry else 1.0), 0
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        todo = [step for step in steps(dry=dry, work=work, kind=kind) if not only or step.name in only]
        while todo:
            together = [step for step in todo if step.together and step.together == todo[0].together] or todo[:1]
            todo = [step for step in todo if step not in together]
            had = count_programs()
            for row in run_together(together, deadline=deadline, log=results / "log.txt"):
                row["compiled"] = count_programs() - had  # with its neighbours
                failed += row["status"] != "done"
                with (results / "steps.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['name']:24s} {row['seconds']:6.1f} s  {row['status']}", flush=True)
            collect(work, results=results)
    return failed


def run_together(together: Sequence[Step], *, deadline: float, log: Path) -> list[dict]:
    """One row per step: name, status (done, failed, late), seconds, seconds of CPU cores, and its last line of JSON."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        **allocator_settings(),
        "PYTHONPATH": path,
        "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "0"),
        # The steps divide the cores. Eight steps with 16 threads each on 16 cores took minutes for an update on the host.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(together))),
    }
    rows, started = [], time.monotonic()
    outputs = [tempfile.TemporaryFile("w+") for _ in together]
    processes = [
        subprocess.Popen(
            step.command, cwd=REPOSITORY, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        for step, out in zip(together, outputs, strict=True)
    ]  # fmt: skip
    for step, process, out in zip(together, processes, outputs, strict=True):
        end, used = min(started + step.limit, deadline), cpu_seconds()
        try:
            code = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        used = cpu_seconds() - used
        seconds = time.monotonic() - started
        out.seek(0)
        text = out.read()
        with log.open("a") as file:
            file.write(f"== {step.name} ({code}, {seconds:.1f} s)\n{text[-200_000:]}\n")
        status = "late" if code is None else "failed" if code else "done"
        rows.append({"name": step.name, "status": status, "seconds": round(seconds, 2), "cpu_seconds": round(used, 1)})
        rows[-1] |= last_json(text)
        if status != "done":
            rows[-1]["error"] = text[-1500:]
        out.close()
    return rows


def cpu_seconds() -> float:
    """Of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def count_programs() -> int:
    """Compiled kernels in Triton's cache."""
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return sum(1 for _ in Path(folder).glob("*/__grp__*"))


def last_json(text: str) -> dict:
    """`{"result": ...}` of the last line that is a JSON object; empty without one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return {"result": json.loads(line)}
            except ValueError:
                continue
    return {}


def collect(work: Path, *, results: Path) -> None:
    """Copies results from `work`; the rows of all kernels become one file."""
    if (work / "tests.xml").is_file():
        shutil.copy(work / "tests.xml", results)
    rows = [row for path in sorted(work.glob("*/kernels-*.json")) for row in json.loads(path.read_text())["rows"]]
    if rows:
        (results / "kernels.json").write_text(json.dumps(rows, indent=1) + "\n")


def prepare(folder: Path, *, target: str) -> int:
    """Downloads the wheels, compiles the kernels for `target`, and writes first.sh."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as sources:
        # antlr4's runtime has only a source archive; pip builds a pure Python wheel.
        pip("wheel", "--no-deps", "-w", str(folder), WHEELS[2], cwd=sources)
    constraints = f"--constraint={REPOSITORY / 'constraints.txt'}"
    pip("download", *OTHER_PYTHON, constraints, "-d", str(folder), *WHEELS[:2])
    compile_kernels(folder / "triton.tar.xz", target=target)
    (folder / "first.sh").write_text(
        "#!/usr/bin/env bash\n# From the checkout: bash FOLDER/first.sh RESULTS\nset -u\n"
        'here=$(cd "$(dirname "$0")" && pwd)\n'
        'python3 -m pip install -q --no-index --no-deps --target /tmp/first_hour "$here"/*.whl\n'
        f'mkdir -p {PROGRAMS} && tar -xJf "$here"/triton.tar.xz -C {PROGRAMS}\n'
        f"export PYTHONPATH=/tmp/first_hour TRITON_CACHE_DIR={PROGRAMS} WANDB_MODE=disabled PYTHONUNBUFFERED=1\n"
        'exec python3 scripts/first_hour.py run "$@"\n'
    )
    nbytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(list(folder.iterdir()))} files, {nbytes / 1e6:.1f} MB in {folder}")
    return 0


OTHER_PYTHON = ("--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}")  # downloads for the GPU machine


def pip(verb: str, *arguments: str, cwd: str | None = None) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", verb, "-q", *arguments], check=True, cwd=cwd
    )


def compile_kernels(archive: Path, *, target: str) -> None:
    """Writes the programs of the kernels' tests and benchmarks, as the GPU machine's Triton looks them up. See `tests.kernels.aot.cache`.

    ZTK_CUDA_BUILD: a folder with that Triton for this Python, which is downloaded otherwise.
    """
    with tempfile.TemporaryDirectory() as name:
        pip("download", *OTHER_PYTHON, "-d", name, f"triton=={TRITON}")
        (wheel,) = Path(name).glob("triton-*.whl")
        build = os.environ.get("ZTK_CUDA_BUILD")
        if build is None:
            build = str(Path(name, "build"))
            pip("install", "--no-deps", "--target", build, f"triton=={TRITON}")
        programs = Path(name, "programs")
        paths = {"PYTHONPATH": os.pathsep.join([build, str(REPOSITORY)]), "TRITON_INTERPRET": "0"}
        command = [sys.executable, "-m", "tests.kernels.aot.cache", str(programs), "--at", PROGRAMS]
        command += ["--target", target, "--libtriton", library_hash(wheel)]
        subprocess.run(command, check=True, cwd=REPOSITORY, env=os.environ | paths)
        with tarfile.open(archive, "w:xz") as file:
            file.add(programs, arcname=".")


def library_hash(wheel: Path) -> str:
    """SHA-256 of Triton's library in a wheel, from the wheel's list of files."""
    with zipfile.ZipFile(wheel) as file:
        record = next(member for member in file.namelist() if member.endswith(".dist-info/RECORD"))
        rows = [line.split(",") for line in file.read(record).decode().splitlines()]
    (code,) = (row[1].removeprefix("sha256=") for row in rows if row[0] == "triton/_C/libtriton.so")
    return base64.urlsafe_b64decode(code + "=" * (-len(code) % 4)).hex()


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("verb", choices=("prepare", "run", "read"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", nargs="+", default=(), help="names of steps (default: all)")
    parser.add_argument("--set", default="first", choices=SETS, help="of steps")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU with small sizes")
    parser.add_argument("--target", default="sm_90", choices=("sm_80", "sm_90", "sm_100"), help="of compiled kernels")
    options = parser.parse_args()
    match options.verb:
        case "prepare":
            return prepare(options.folder, target=options.target)
        case "run":
            return int(bool(run(options.folder, dry=options.dry_run, only=options.steps, kind=options.set)))
        case _:
            return read(options.folder)


if __name__ == "__main__":
    sys.exit(main())
