"""Runs the training scripts of DeepSpeed-Chat, unchanged, under `python -m ztk.deepspeed`: each step at ZeRO stages 0, 2 and 3 with
its options, on tiny local models and two ranks of this machine.

    python scripts/run_deepspeed_chat.py CHECKOUT/applications/DeepSpeed-Chat --work FOLDER [--only REGEX]

Every run adds a line to FOLDER/cells.jsonl and a log. FOLDER/table.md has the last result of each: the last losses and a digest of the saved
weights, or the first line of an error. Results must be equal over the stages that run an option: exit code 1 if some differ, or if a run ends
without losses and without an error line. Only `align overflow` differs at stage 0, where DeepSpeed's loss scale has no hysteresis. It is
compared at stages 2 and 3, and at all three with a hysteresis of one, set by a wrapper around the scripts' `get_train_ds_config`. Step 3 has
no warm-up of the learning rate and fp32 losses, so that updates change the printed losses.

transformers 5 has moved a name that the scripts import (`no_init_weights`), and TensorBoard may be missing: a folder on PYTHONPATH provides
both, and the wrapper, to the processes of the run.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGES = (0, 2, 3)
STEPS = {
    "sft": "step1_supervised_finetuning",
    "reward": "step2_reward_model_finetuning",
    "dpo": "step2_dpo_finetuning",
    "ppo": "step3_rlhf_finetuning",
}
LORA = "--{0}lora_dim 4 --{0}lora_module_name decoder.layers."
OPTIONS = {  # step -> option -> arguments
    **{
        step: {
            "": "",
            "lora": LORA.format(""),
            "only lora": LORA.format("") + " --only_optimize_lora",
            "offload": "--offload",
        }
        for step in ("sft", "reward", "dpo")
    },
    "ppo": {
        "": "",
        "lora": LORA.format("actor_"),
        "only lora": LORA.format("actor_") + " --only_optimize_lora",
        "offload": "--offload --offload_reference_model",
        "hybrid": "--enable_hybrid_engine",
        "hybrid, streamed": "--enable_hybrid_engine --unpin_actor_parameters --release_inference_cache",
        "hybrid, lora": "--enable_hybrid_engine " + LORA.format("actor_"),
        "ema": "--enable_ema",
        "align overflow": "--align_overflow --dtype fp16",
        "align overflow, hysteresis 1": "--align_overflow --dtype fp16",
        "mixed-precision lora": "--enable_mixed_precision_lora --only_optimize_lora " + LORA.format("actor_"),
    },
}
OWN_AT_STAGE_0 = {"align overflow"}  # options whose losses are compared over the other stages
COMPLETION = """
import contextlib, os, sys, types
if "RANK" in os.environ:
    import transformers.modeling_utils as modeling
    if not hasattr(modeling, "no_init_weights"):
        modeling.no_init_weights = contextlib.nullcontext
    try:
        import torch.utils.tensorboard
    except ImportError:
        missing = types.ModuleType("torch.utils.tensorboard")
        missing.SummaryWriter = None
        sys.modules["torch.utils.tensorboard"] = missing
    if "CHAT_HYSTERESIS" in os.environ:
        import dschat.utils.ds_utils as ds_utils
        made = ds_utils.get_train_ds_config
        def with_hysteresis(*given, **named):
            config = made(*given, **named)
            config["fp16"]["hysteresis"] = int(os.environ["CHAT_HYSTERESIS"])
            return config
        ds_utils.get_train_ds_config = with_hysteresis
"""
FOUND = {
    "sft": r"^ppl: .*, loss: (\S+)",
    "reward": r"chosen_last_scores.*?: (\S+), rejected.*?: (\S+),",
    "dpo": r"^chosen: (\S+), rejected: (\S+), loss: (\S+)",
    "ppo": r"Actor Loss: (\S+) \| Critic Loss: (\S+)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, help="the folder applications/DeepSpeed-Chat of a checkout")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder, or one of an earlier run")
    parser.add_argument("--only", default="", help="a regular expression: names such as 'ppo 3 hybrid'")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one run")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    work = given.work.resolve()
    prepare(work, scripts=given.scripts.resolve())
    for step, options in OPTIONS.items():
        for option, words in options.items():
            for stage in STAGES:
                name = f"{step} {stage} {option}".strip()
                if re.search(given.only, name):
                    keep(run(name, step, stage, words, work=work, given=given), work=work)
                    write_table(work)
    sys.exit(code_of(write_table(work)))


def keep(cell: dict[str, object], *, work: Path) -> None:
    """Appends the result of a run to the folder's results and prints it."""
    with (work / "cells.jsonl").open("a") as file:
        file.write(json.dumps(cell) + "\n")
    print(*cell.values(), sep=" | ", flush=True)


def code_of(table: str) -> int:
    """The script's exit code: 1 if a row of the table has different or failed runs."""
    return int("| differ |" in table or "| failed |" in table)


def agreement(row: list[str], *, first: int = 0) -> str:
    """Whether the results of a row, one per stage, are equal from place `first` on. A run with an error line was refused at that stage; a run
    that ended in another way has failed."""
    compared = row[first:]
    losses = [result for result in compared if result and not result.startswith("exit code")]
    if any(re.match(r"exit code (?!1: )|exit code 1: no error", result) for result in row):
        return "failed"
    if len(set(losses)) > 1:
        return "differ"
    return "-" if len(losses) < 2 else "equal at 2, 3" if first else "equal"


def write_table(work: Path) -> str:
    """The table of all cells so far, a row per option, a column per stage."""
    cells = [json.loads(line) for line in (work / "cells.jsonl").read_text().splitlines()]
    results = {cell["name"]: cell["result"] for cell in cells}
    lines = ["| step | option | stage 0 | stage 2 | stage 3 | over stages |\n", "|---" * 6 + "|\n"]
    for step, options in OPTIONS.items():
        for option in options:
            row = [results.get(f"{step} {stage} {option}".strip(), "") for stage in STAGES]
            found = agreement(row, first=int(option in OWN_AT_STAGE_0))
            lines.append(f"| {step} | {option or '-'} | {' | '.join(row)} | {found} |\n")
    (work / "table.md").write_text("".join(lines))
    return "".join(lines)


def run(name: str, step: str, stage: int, words: str, *, work: Path, given: argparse.Namespace) -> dict[str, object]:
    """Runs one script. Returns name, result (the last losses, or the error) and seconds."""
    scripts, log, began = (
        given.scripts.resolve(),
        work / f"{name.replace(' ', '_').replace(',', '')}.log",
        time.monotonic(),
    )
    path = os.pathsep.join([str(work / "completion"), str(ROOT), str(scripts)])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if hysteresis := re.search(r"hysteresis (\d+)", name):
        environment |= {"CHAT_HYSTERESIS": hysteresis[1]}
    saved = work / "out" / f"{step}{stage}"
    shutil.rmtree(saved, ignore_errors=True)
    command = [sys.executable, "-m", "ztk.deepspeed", "--num_gpus", "2", "main.py"]
    arguments = f"{arguments_of(step, stage, work)} {words}".split()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command + arguments,
                cwd=scripts / "training" / STEPS[step],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=given.timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    text, spent = log.read_text(errors="replace"), round(time.monotonic() - began)
    if code:
        errors = [
            line for line in text.splitlines() if re.match(r"(\[rank\d\]: )?\w*(\.\w+)*(Error|Exception)\b", line)
        ]
        return {
            "name": name,
            "result": f"exit code {code}: {(errors or ['no error in the log'])[0][:300]}",
            "seconds": spent,
        }
    found = re.findall(FOUND[step], text, flags=re.MULTILINE)
    losses = [found[-1]] if found and isinstance(found[-1], str) else found[-1] if found else ["exit code 0, no losses"]
    return {"name": name, "result": f"{', '.join(losses)}; {digest_of(saved)}", "seconds": spent}


def digest_of(folder: Path) -> str:
    """The digest of all values in a script's saved weight files: folders, names, dtypes and bits. Of tied values the first name counts, because
    the scripts save only that one at stage 3."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for file in sorted([*folder.rglob("*.bin"), *folder.rglob("*.safetensors")]):
        is_pickled, names = file.suffix == ".bin", {}
        values = torch.load(file, map_location="cpu", weights_only=True) if is_pickled else load_file(file)
        for name, value in values.items():
            names.setdefault(value.data_ptr(), name)
        for name in sorted(names.values()):
            value = values[name]
            digest.update(f"{file.parent.relative_to(folder)} {name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]


def arguments_of(step: str, stage: int, work: Path) -> str:
    common = (
        f"--data_path local/jsonfile --data_split 2,4,4 --data_output_path {work}/data --num_train_epochs 1 --deepspeed --dtype bf16 "
        f"--seed 1 --output_dir {work}/out/{step}{stage}"
    )
    if step == "ppo":
        return (
            f"{common} --actor_model_name_or_path {work}/model --critic_model_name_or_path {work}/critic --actor_zero_stage {stage} "
            f"--critic_zero_stage {stage} --max_prompt_seq_len 32 --max_answer_seq_len 12 --per_device_generation_batch_size 2 "
            "--per_device_training_batch_size 2 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --num_warmup_steps 0 "
            "--compute_fp32_loss --enable_test_mode --test_stop_step 4 --num_padding_at_beginning 0"
        )
    model = f"--model_name_or_path {work}/model --zero_stage {stage} --learning_rate 1e-3 --max_seq_len 48"
    more = " --num_padding_at_beginning 0" if step == "reward" else ""
    return f"{common} {model} --per_device_train_batch_size 4 --per_device_eval_batch_size 4{more}"


def prepare(work: Path, *, scripts: Path) -> None:
    """Writes a tokenizer, an OPT, a reward model's file, and the data to the scripts' paths."""
    (work / "completion").mkdir(exist_ok=True)
    (work / "completion" / "sitecustomize.py").write_text(COMPLETION)
    rows = [_row(number) for number in range(50)]
    (scripts / "data").mkdir(exist_ok=True)
    for name, count in (("train", 160), ("eval", 40)):
        lines = [json.dumps(rows[number % 50]) for number in range(count)]
        (scripts / "data" / f"{name}.json").write_text("\n".join(lines))
    if (work / "critic" / "pytorch_model.bin").exists():
        return
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import GPT2Tokenizer, OPTConfig, OPTForCausalLM

    folder = work / "model"
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special, letters = ["<|endoftext|>", "</s>", "<pad>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([text for row in rows for text in row.values()], trainer)
    tokenizer.model.save(str(folder))
    merges = [tuple(line.split(" ")) for line in (folder / "merges.txt").read_text().splitlines()[1:]]
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "</s>", "unk_token": "</s>"}
    vocabulary = json.loads((folder / "vocab.json").read_text())
    made = GPT2Tokenizer(vocab=vocabulary, merges=merges, vocab_file=str(folder / "vocab.json"), **names)
    made.save_pretrained(folder)
    shape = {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = OPTConfig(
        vocab_size=-(-len(made) // 8) * 8,
        **shape,
        max_position_embeddings=256,
        dropout=0.0,
        pad_token_id=made.pad_token_id,
        bos_token_id=made.bos_token_id,
        eos_token_id=made.eos_token_id,
    )
    torch.manual_seed(0)
    model = OPTForCausalLM(config)
    model.save_pretrained(folder)
    made.save_pretrained(work / "critic")
    config.save_pretrained(work / "critic")
    state = {f"rwtransformer.{name}": value for name, value in model.model.state_dict().items()}
    torch.save(state | {"v_head.weight": torch.randn(1, 32) / 4}, work / "critic" / "pytorch_model.bin")


def _row(number: int) -> dict[str, str]:
    upwards = " ".join(str((number + step) % 50) for step in range(4))
    others = " ".join(str((number * 7 + 3 * step) % 50) for step in range(4))
    return {
        "prompt": f"\n\nHuman: count from {number} \n\nAssistant:",
        "chosen": f" {upwards}",
        "rejected": f" {others}",
    }


if __name__ == "__main__":
    main()
