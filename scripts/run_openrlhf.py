"""Runs OpenRLHF's scripts train_sft, train_rm and train_dpo, unchanged, under `python -m ztk.deepspeed`: at ZeRO stages 0, 2 and 3 with
the DeepSpeed options of its strategy, on a tiny local model in bf16 and two CPU ranks of this machine.

    pip install torchdata
    python scripts/run_openrlhf.py CHECKOUT --work FOLDER [--only REGEX]

CHECKOUT is a checkout of https://github.com/OpenRLHF/OpenRLHF with the folder `openrlhf`. Every run adds a line to FOLDER/cells.jsonl and a
log. FOLDER/table.md has the last result of each: the last step's loss and gradient norm and a digest of the saved weights, or the first line
of an error. Results must be equal over the stages that run an option: exit code 1 if some differ, or if a run fails without an error line.
`resumed` continues from the checkpoint of the first of two epochs, and must equal the uninterrupted run.

OpenRLHF is made for GPUs. A folder on PYTHONPATH replaces its calls of torch.cuda, makes its meshes of CPU ranks, and replaces packages that
are imported but not used here (flash_attn, pylatexenc) or only receive logs (wandb).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import parser_of
from scripts.run_deepspeed_chat import agreement, code_of, digest_of, keep
from tests.hf import small

ROOT = Path(__file__).resolve().parents[1]
STAGES = (0, 2, 3)
PAIRS = "--data.prompt_key question --data.chosen_key good --data.rejected_key bad --ds.attn_implementation sdpa"
STEPS = {
    "sft": "--data.input_key question --data.output_key good --data.input_template q{{}}a --ds.attn_implementation sdpa",
    "rm": f"{PAIRS} --eval.dataset {{work}}/pairs.jsonl",
    "dpo": f"{PAIRS} --ref.model_name_or_path {{work}}/model",
}
SAVED = 8  # steps of an epoch, after which `resumed` begins
OPTIONS = {
    "": "",
    "lora": "--ds.lora.rank 4",
    "adam offload": "--ds.adam_offload",
    "overlap, fp32 gradients": "--ds.overlap_comm --ds.grad_accum_dtype fp32",
    "recomputation": "--model.gradient_checkpointing_enable",
    "resumed": f"--ckpt.save_steps {SAVED} --ckpt.path {{work}}/ckpt/{{step}}{{stage}} --ckpt.load_enable",
}
FOR_DPO = {"reference offload": "--ref.offload"}
STAND_INS = """
import json, os, sys, types
from importlib.machinery import ModuleSpec
if "RANK" in os.environ:
    def stand_in(name, **names):
        module = types.ModuleType(name)
        module.__dict__.update(names)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
        return module
    unused = dict.fromkeys(("index_first_axis", "pad_input", "rearrange", "unpad_input", "all_gather"))
    for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"):
        stand_in(name, __path__=[], **unused)
    stand_in("pylatexenc", latex2text=None)
    passes = lambda *given, **named: None
    stand_in(
        "wandb", api=types.SimpleNamespace(api_key="none"), init=passes, define_metric=passes, finish=passes,
        log=lambda logs: print("logged", json.dumps(logs), flush=True),
    )
    import torch
    import torch.distributed.device_mesh as meshes
    # torch._dynamo refuses one function with two names of torch.
    torch.cuda.set_device, torch.cuda.synchronize = lambda *given: None, lambda *given: None
    torch.cuda.current_device = lambda: "cpu"
    made = meshes.init_device_mesh
    meshes.init_device_mesh = lambda kind, *given, **named: made("cpu", *given, **named)
"""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("checkout", type=Path, help="a folder that contains the folder openrlhf")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder, or one of an earlier run")
    parser.add_argument("--only", default="", help="a regular expression: names such as 'dpo 3 lora'")
    given = parser.parse_args()
    work = given.work.resolve()
    prepare(work)
    for step in STEPS:
        for option in options_of(step):
            for stage in STAGES:
                if re.search(given.only, f"{step} {stage} {option}".strip()):
                    keep(run(step, stage=stage, option=option, work=work, checkout=given.checkout.resolve()), work=work)
                    write_table(work)
    sys.exit(code_of(write_table(work)))


def options_of(step: str) -> dict[str, str]:
    return OPTIONS | FOR_DPO if step == "dpo" else OPTIONS


def prepare(work: Path) -> None:
    """Writes the stand-ins, a Llama with a tokenizer of letters, and pairs that all have the same chosen answer."""
    (work / "stand_ins").mkdir(parents=True, exist_ok=True)
    (work / "stand_ins" / "sitecustomize.py").write_text(STAND_INS)
    if not (work / "model").is_dir():
        small.save_model(work / "model")
    words = [f"ab{number % 10}c{number * 7 % 10}" for number in range(64)]
    rows = [{"question": word, "good": "xyz", "bad": word[::-1]} for word in words]
    (work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(step: str, *, stage: int, option: str, work: Path, checkout: Path) -> dict[str, object]:
    """Runs one script. Returns step, stage, option, result (last loss, norm and a digest, or the error) and seconds."""
    name = "_".join(f"{step} {stage} {option}".replace(",", "").split())
    log, saved, began = work / f"{name}.log", work / "out" / f"{step}{stage}", time.monotonic()
    kept = work / "ckpt" / f"{step}{stage}"
    for folder in (saved, kept):
        shutil.rmtree(folder, ignore_errors=True)
    path = os.pathsep.join([str(work / "stand_ins"), str(ROOT), str(checkout)])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = f"{arguments_of(step)} {options_of(step)[option]}".format(work=work, step=step, stage=stage).split()
    command = [sys.executable, "-m", "ztk.deepspeed", "--num_gpus", "2", "--module", f"openrlhf.cli.train_{step}"]
    command += [*words, "--ds.zero_stage", str(stage), "--ckpt.output_dir", str(saved)]
    options = {"cwd": work, "env": environment, "stderr": subprocess.STDOUT}
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, **options).returncode
    if option == "resumed" and not code:
        (kept / "latest").write_text(f"global_step{SAVED}")
        shutil.rmtree(saved)
        with log.open("w") as file:
            code = subprocess.run(command, stdout=file, **options).returncode
    text, cell = log.read_text(errors="replace"), {"step": step, "stage": stage, "option": option}
    if code:
        errors = re.findall(r"^(?:\[rank\d\]: )?(\w*(?:\.\w+)*(?:Error|Exception)\b.*)", text, flags=re.MULTILINE)
        result = f"exit code {code}: {(errors or ['no error in the log'])[0][:300]}"
    else:
        logged = re.findall(r'logged (\{"train/[^}]*\})', text)  # after a progress bar without a line feed
        last = json.loads(logged[-1]) if logged else {"train/loss_mean": "no losses", "train/grad_norm": ""}
        result = f"{last['train/loss_mean']}, {last['train/grad_norm']}; {digest_of(saved)}"
    return cell | {"result": result, "seconds": round(time.monotonic() - began)}


def arguments_of(step: str) -> str:
    return (
        "--model.model_name_or_path {work}/model --data.dataset {work}/pairs.jsonl --data.max_len 48 --train.batch_size 8 "
        "--train.micro_batch_size 2 --train.max_epochs 2 --adam.lr 1e-3 --lr_warmup_ratio 0 --logger.wandb.key none "
        + STEPS[step]
    )


def write_table(work: Path) -> str:
    """The table of all cells so far, a row per option, a column per stage."""
    cells = [json.loads(line) for line in (work / "cells.jsonl").read_text().splitlines()]
    results = {(cell["step"], cell["stage"], cell["option"]): cell["result"] for cell in cells}
    lines = ["| script | option | stage 0 | stage 2 | stage 3 | over stages |\n", "|---" * 6 + "|\n"]
    for step in STEPS:
        for option in options_of(step):
            row = [results.get((step, stage, option), "") for stage in STAGES]
            lines.append(f"| {step} | {option or '-'} | {' | '.join(row)} | {agreement(row)} |\n")
    (work / "table.md").write_text("".join(lines))
    return "".join(lines)


if __name__ == "__main__":
    main()
