"""TRL's trainers at stages 2 and 3, with adapters and without, compared with runs without DeepSpeed. Tolerances: see test_trainer."""

import functools
import os

import pytest
import torch

from tests.hf import small

STEPS, MICRO = 3, 4
WORDS = [f"abc{number % 10}" for number in range(64)]


def options(folder, *, config, micro) -> dict:
    plain = {"use_cpu": True} if config is None else {"deepspeed": config}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "bf16": False, "logging_steps": 1}
    return (
        {"output_dir": folder, "max_steps": STEPS, "learning_rate": 5e-3, "per_device_train_batch_size": micro}
        | plain
        | quiet
    )


def even_digits(completions, **_) -> list[float]:
    return [float(sum(letter in "02468" for letter in text)) for text in completions]


def sft(source, **shared):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(max_length=16, **options(**shared))
    return functools.partial(SFTTrainer, source, args=args, train_dataset=Dataset.from_dict({"text": WORDS}))


def dpo(source, **shared):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = {"prompt": WORDS, "chosen": ["xyz"] * len(WORDS), "rejected": [word[::-1] for word in WORDS]}
    args = DPOConfig(max_length=16, **options(**shared))
    return functools.partial(DPOTrainer, source, args=args, train_dataset=Dataset.from_dict(pairs))


def reward(source, **shared):
    from datasets import Dataset
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    folder = f"{source}_with_score"  # a head that every run reads; drawn ones depend on who draws them
    if not os.path.isdir(folder):
        torch.manual_seed(2)
        LlamaForSequenceClassification(small.llama_config(num_labels=1)).save_pretrained(folder)
        small.tokenizer().save_pretrained(folder)
    pairs = {"prompt": WORDS, "chosen": ["xyz"] * len(WORDS), "rejected": [word[::-1] for word in WORDS]}
    args = RewardConfig(max_length=16, **options(**shared))
    return functools.partial(RewardTrainer, folder, args=args, train_dataset=Dataset.from_dict(pairs))


def grpo(source, **shared):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(num_generations=4, max_completion_length=6, beta=0.04, **options(**shared))
    data = Dataset.from_dict({"prompt": WORDS})
    return functools.partial(GRPOTrainer, source, args=args, train_dataset=data, reward_funcs=even_digits)


def train(*, trainer, source, folder, config=None, micro=MICRO, lora=False) -> list[float]:
    """Losses and norms of a script: the trainer loads the model by its name, and a reference model if it needs one."""
    from peft import LoraConfig

    kind = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if trainer is reward else {"task_type": "CAUSAL_LM"}
    lora_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **kind) if lora else None
    made = trainer(source, folder=folder, config=config, micro=micro)
    made = made(processing_class=small.tokenizer(), peft_config=lora_config)
    made.train()
    log = made.state.log_history
    made.accelerator.free_memory()
    return [float(entry[name]) for entry in log for name in ("loss", "grad_norm") if name in entry]


@pytest.mark.parametrize("trainer", [sft, reward, dpo])
def test_losses_are_those_without_deepspeed(hf, model_folder, tmp_path, trainer):
    shared = {"trainer": trainer, "source": model_folder, "folder": str(tmp_path)}
    for lora in (False, True):
        expected = train(**shared, micro=2 * MICRO, lora=lora)
        for stage in (2, 3):
            found = hf(train, **shared, config=small.ds_config(stage), lora=lora)[0]
            assert found == pytest.approx(expected, rel=1e-5) and len(found) == 2 * STEPS


def test_grpo_generates_and_learns_the_same_at_stages_2_and_3(hf, model_folder, tmp_path):
    """Each rank samples its own completions, so ranks of two runs are compared: the same samples, the same losses, which are near zero by
    construction: advantages of a group add up to zero."""
    shared = {"trainer": grpo, "source": model_folder, "folder": str(tmp_path)}
    for lora in (False, True):
        two, three = (hf(train, **shared, config=small.ds_config(stage), lora=lora)[0] for stage in (2, 3))
        assert three == pytest.approx(two, rel=1e-5, abs=1e-6) and len(three) == 2 * STEPS
        assert min(three[1::2]) > 1e-3  # rewards differ: there are gradients
