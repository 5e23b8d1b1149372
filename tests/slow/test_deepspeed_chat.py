"""The training scripts of DeepSpeed-Chat, unchanged, print the recorded losses and save the recorded weights at every ZeRO stage and with their
options, on tiny local models.

    git clone https://github.com/deepspeedai/DeepSpeedExamples && git -C DeepSpeedExamples checkout 45b4b71
    ZTK_DEEPSPEED_CHAT=DeepSpeedExamples/applications/DeepSpeed-Chat pytest tests/slow/test_deepspeed_chat.py -k "ppo and stage3 and hybrid"

Only `align_overflow` differs at stage 0, where DeepSpeed's loss scale has no hysteresis. With a hysteresis of one, set by a wrapper around
the scripts' `get_train_ds_config`, all stages are equal. Step 3 has no warm-up of the learning rate and fp32 losses, so that updates change the
printed losses.

transformers 5 has moved a name that the scripts import (`no_init_weights`), and TensorBoard may be missing: a folder on PYTHONPATH provides
both, and the wrapper, to the processes of the run.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.slow.programs import digest_of, run_program

CHECKOUT = os.environ.get("ZTK_DEEPSPEED_CHAT")
STEPS = {
    "sft": "step1_supervised_finetuning",
    "reward": "step2_reward_model_finetuning",
    "dpo": "step2_dpo_finetuning",
    "ppo": "step3_rlhf_finetuning",
}
COMMON = (
    "--data_path local/jsonfile --data_split 2,4,4 --data_output_path {work}/data --num_train_epochs 1 --deepspeed --dtype bf16 "
    "--seed 1 --output_dir {saved} "
)
ONE_MODEL = (
    "--model_name_or_path {work}/model --zero_stage {stage} --learning_rate 1e-3 --max_seq_len 48 --per_device_train_batch_size 4 "
    "--per_device_eval_batch_size 4 "
)
ARGUMENTS = {
    "sft": ONE_MODEL,
    "reward": ONE_MODEL + "--num_padding_at_beginning 0 ",
    "dpo": ONE_MODEL,
    "ppo": (
        "--actor_model_name_or_path {work}/model --critic_model_name_or_path {work}/critic --actor_zero_stage {stage} "
        "--critic_zero_stage {stage} --max_prompt_seq_len 32 --max_answer_seq_len 12 --per_device_generation_batch_size 2 "
        "--per_device_training_batch_size 2 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --num_warmup_steps 0 "
        "--compute_fp32_loss --enable_test_mode --test_stop_step 4 --num_padding_at_beginning 0 "
    ),
}
LORA = "--lora_dim 4 --lora_module_name decoder.layers."
ACTOR_LORA = "--actor_lora_dim 4 --actor_lora_module_name decoder.layers."
OF_ONE_MODEL = {
    "plain": "",
    "lora": LORA,
    "only_lora": LORA + " --only_optimize_lora",
    "offload": "--offload",
}
OPTIONS = {  # step -> option -> arguments
    "sft": OF_ONE_MODEL,
    "reward": OF_ONE_MODEL,
    "dpo": OF_ONE_MODEL,
    "ppo": {
        "plain": "",
        "lora": ACTOR_LORA,
        "only_lora": ACTOR_LORA + " --only_optimize_lora",
        "offload": "--offload --offload_reference_model",
        "hybrid": "--enable_hybrid_engine",
        "hybrid_streamed": "--enable_hybrid_engine --unpin_actor_parameters --release_inference_cache",
        "hybrid_lora": "--enable_hybrid_engine " + ACTOR_LORA,
        "ema": "--enable_ema",
        "align_overflow": "--align_overflow --dtype fp16",
        "hysteresis_1": "--align_overflow --dtype fp16",
        "mixed_precision_lora": "--enable_mixed_precision_lora --only_optimize_lora " + ACTOR_LORA,
    },
}
# The last values that a script prints, and the digest of the weights that it saves, at every stage. torch 2.13.0+cpu, transformers 5.17.0.
RECORDED = {
    "sft": {
        "plain": "5.574182510375977; c02056ce",
        "lora": "5.657444953918457; 93a7317a",
        "only_lora": "5.809487342834473; 4473739a",
        "offload": "5.574182510375977; c02056ce",
    },
    "reward": {
        "plain": "-0.8212890625, -0.859375; 44eb75c6",
        "lora": "-0.8857421875, -0.6875; a7641da0",
        "only_lora": "-0.744140625, -0.383056640625; f974bb0a",
        "offload": "-0.8212890625, -0.859375; 44eb75c6",
    },
    "dpo": {
        "plain": "0.275390625, 0.125, 0.5771484375; 681b9407",
        "lora": "0.10009765625, 0.050048828125, 0.6376953125; 85d6b152",
        "only_lora": "0.0, 0.0, 0.6904296875; 10fab338",
        "offload": "0.275390625, 0.125, 0.5771484375; 681b9407",
    },
    "ppo": {
        "plain": "0.2748067080974579, 0.08236964792013168; b8f6dc3e",
        "lora": "0.2787534296512604, 0.08447718620300293; 79eb9689",
        "only_lora": "0.2534230649471283, 0.07705974578857422; 00387bfc",
        "offload": "0.2748067080974579, 0.08236964792013168; b8f6dc3e",
        "hybrid": "0.2748067080974579, 0.08236964792013168; b8f6dc3e",
        "hybrid_streamed": "0.2748067080974579, 0.08236964792013168; b8f6dc3e",
        "hybrid_lora": "0.2787534296512604, 0.08447718620300293; 79eb9689",
        "ema": "0.2748067080974579, 0.08236964792013168; beace048",
        "align_overflow": "0.27085885405540466, 0.08291880041360855; 31aebd55",
        "hysteresis_1": "0.2332725077867508, 0.09281808137893677; 23322d73",
        "mixed_precision_lora": "0.2548843026161194, 0.07703841477632523; e375b8b4",
    },
}
RECORDED_AT_STAGE_0 = {"align_overflow": RECORDED["ppo"]["hysteresis_1"]}
# Options of step 3 that a stage refuses, and the error.
REFUSED = {
    ("ema", 3): "written inside GatheredParameters without modifier_rank, so the values would be lost",
    ("mixed_precision_lora", 0): "zero_quantized_nontrainable_weights=True: has no effect at stage 0",
    ("mixed_precision_lora", 2): "zero_quantized_nontrainable_weights=True: has no effect at stage 2",
}
PRINTED = {
    "sft": r"^ppl: .*, loss: (\S+)",
    "reward": r"chosen_last_scores.*?: (\S+), rejected.*?: (\S+),",
    "dpo": r"^chosen: (\S+), rejected: (\S+), loss: (\S+)",
    "ppo": r"Actor Loss: (\S+) \| Critic Loss: (\S+)",
}
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

pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="ZTK_DEEPSPEED_CHAT names no folder of DeepSpeed-Chat")


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a copy of the scripts, whose folder `data` they read, a tokenizer, an OPT, and a reward model's file."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import GPT2Tokenizer, OPTConfig, OPTForCausalLM

    work = tmp_path_factory.mktemp("deepspeed_chat")
    for name in ("dschat", "training"):
        shutil.copytree(Path(CHECKOUT) / name, work / "scripts" / name)
    (work / "sitecustomize.py").write_text(COMPLETION)
    rows = [_row(number) for number in range(50)]
    (work / "scripts" / "data").mkdir()
    for name, count in (("train", 160), ("eval", 40)):
        lines = [json.dumps(rows[number % 50]) for number in range(count)]
        (work / "scripts" / "data" / f"{name}.json").write_text("\n".join(lines))

    folder = work / "model"
    folder.mkdir()
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
    config = OPTConfig(
        vocab_size=-(-len(made) // 8) * 8,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
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
    return work


def _row(number: int) -> dict[str, str]:
    upwards = " ".join(str((number + step) % 50) for step in range(4))
    others = " ".join(str((number * 7 + 3 * step) % 50) for step in range(4))
    return {
        "prompt": f"\n\nHuman: count from {number} \n\nAssistant:",
        "chosen": f" {upwards}",
        "rejected": f" {others}",
    }


@pytest.mark.parametrize("stage", [0, 2, 3], ids="stage{}".format)
@pytest.mark.parametrize(("step", "option"), [(step, option) for step in OPTIONS for option in OPTIONS[step]])
def test_losses_weights_and_refusals(tmp_path, work, step, option, stage):
    arguments = (COMMON + ARGUMENTS[step] + OPTIONS[step][option]).format(work=work, saved=tmp_path, stage=stage)
    code, text = run_program(
        "main.py",
        *arguments.split(),
        cwd=work / "scripts" / "training" / STEPS[step],
        path=(work, work / "scripts"),
        environment={"CHAT_HYSTERESIS": "1"} if option == "hysteresis_1" else {},
    )
    if refusal := REFUSED.get((option, stage)):
        assert code == 1 and re.search(rf"Error: .*{re.escape(refusal)}", text), text[-5000:]
        return
    printed = re.findall(PRINTED[step], text, flags=re.MULTILINE)
    assert code == 0 and printed, text[-5000:]
    values = [printed[-1]] if step == "sft" else printed[-1]
    recorded = RECORDED[step][option] if stage else RECORDED_AT_STAGE_0.get(option, RECORDED[step][option])
    assert f"{', '.join(values)}; {digest_of(tmp_path)}" == recorded
