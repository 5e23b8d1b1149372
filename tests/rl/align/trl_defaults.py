"""docs/trl_defaults.md: every default of TRL's trainers next to ztk's, from TRL's own configuration classes.

`python -m tests.rl.align.trl_defaults` writes the page, `test_trl_page.py` compares it. An option of TRL without a counterpart in ztk is in
`WITHOUT`, so a new one fails the test until it is sorted. Needs `pip install trl`.
"""

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.hf import small
from ztk.config import Config, Machine, compose
from ztk.config.keys import read

PAGE = Path(__file__).parents[3] / "docs" / "trl_defaults.md"
HEAD = """# Defaults next to TRL's

The [alignment tasks](alignment.md) and [GRPO](rollouts.md) have TRL's defaults where both have an option. This page compares
them for a model of transformers (`model=hf`) with records of yours on one GPU. `python -m tests.rl.align.trl_defaults` writes it from the
configuration classes of TRL {version}, and `tests/rl/align/test_trl_page.py` fails if either side changes.

A decoder of ztk's from random weights (`model=nano`, the default of the built-in tasks) has larger learning rates and `scheduler=cosine`.
"""
STEPS = "ztk counts steps and sequences of all ranks, not epochs"
WHOLE = "texts are never cut: a longer one is refused"
DROPOUT = "dropout follows `config.json`"
# TRL's option -> (ztk's key, the reason for another default), for all trainers.
COMMON: dict[str, tuple[str, str]] = {
    "learning_rate": ("optimizer.lr", ""),
    "lr_scheduler_type": ("scheduler.name", ""),
    "warmup_steps": ("scheduler.warmup_steps", ""),
    "adam_beta1": ("optimizer.betas.0", ""),
    "adam_beta2": ("optimizer.betas.1", ""),
    "adam_epsilon": ("optimizer.eps", ""),
    "weight_decay": ("optimizer.weight_decay", ""),
    "max_grad_norm": ("optimizer.clip_grad_norm", ""),
    "per_device_train_batch_size": ("train.micro_batch_size", STEPS),
    "gradient_accumulation_steps": ("train.accumulation_steps", STEPS),
    "max_steps": ("train.steps", STEPS),
    "seed": ("train.seed", "no seed gives equal numbers in both"),
    "bf16": ("precision.dtype", "TRL sets it for the forward alone. `precision=bf16` has weights of bf16, too"),
    "gradient_checkpointing": ("recompute.mode", "recomputing changes no number, and costs a forward"),
    "max_length": ("data.seq_len", WHOLE),
}
OWN: dict[str, dict[str, tuple[str, str]]] = {
    "SFTConfig": {"completion_only_loss": ("sft.mask_prompts", "null: the answer alone, where a record has a prompt")},
    "RewardConfig": {"center_rewards_coefficient": ("reward.centring", "")},
    "DPOConfig": {
        "beta": ("dpo.beta", ""),
        "loss_type": ("dpo.loss", ""),
        "label_smoothing": ("dpo.label_smoothing", ""),
        "precompute_ref_log_probs": ("dpo.reference", "false: a frozen model computes them"),
    },
    "KTOConfig": {
        "beta": ("dpo.beta", ""),
        "loss_type": ("dpo.loss", ""),
        "desirable_weight": ("dpo.desirable_weight", ""),
        "undesirable_weight": ("dpo.undesirable_weight", ""),
        "precompute_ref_log_probs": ("dpo.reference", "false: a frozen model computes them"),
    },
    "ORPOConfig": {"beta": ("dpo.beta", "")},
    "CPOConfig": {
        "beta": ("dpo.beta", ""),
        "loss_type": ("dpo.loss", "`dpo.loss=simpo` is `loss_type=simpo`"),
        "label_smoothing": ("dpo.label_smoothing", ""),
        "simpo_gamma": ("dpo.margin", ""),
        "cpo_alpha": ("dpo.sft_weight", ""),
    },
    "GKDConfig": {
        "beta": ("distill.beta", ""),
        "lmbda": ("distill.fraction", ""),
        "seq_kd": ("distill.seq_kd", ""),
        "temperature": ("rollout.temperature", ""),
        "max_new_tokens": ("rollout.max_tokens", ""),
    },
    "GRPOConfig": {
        "num_generations": ("rollout.group_size", ""),
        "max_completion_length": ("rollout.max_tokens", ""),
        "temperature": ("rollout.temperature", ""),
        "top_p": ("rollout.top_p", ""),
        "top_k": ("rollout.top_k", ""),
        "min_p": ("rollout.min_p", ""),
        "beta": ("kl.coef", ""),
        "epsilon": ("policy.clip_low", ""),
        "epsilon_high": ("policy.clip_high", "null: `epsilon`"),
        "importance_sampling_level": ("policy.ratio", ""),
        "loss_type": ("policy.average", "`dapo` divides by the tokens of all answers of a step, as `tokens` does"),
        "scale_rewards": ("advantage.scale", ""),
        "mask_truncated_completions": ("rollout.mask_truncated", ""),
        "log_completions": ("rollout.save_completions", ""),
    },
}
CHOICES = {
    "SFTConfig": ("trl", "task=sft"),
    "RewardConfig": ("trl", "task=reward"),
    "DPOConfig": ("trl", "task=dpo"),
    "KTOConfig": ("trl", "task=dpo dpo.loss=kto"),
    "ORPOConfig": ("trl.experimental.orpo", "task=dpo dpo.loss=orpo"),
    "CPOConfig": ("trl.experimental.cpo", "task=dpo dpo.loss=simpo"),
    "GKDConfig": ("trl.experimental.gkd", "task=distill"),
    "GRPOConfig": ("trl", "task=grpo"),
}
# Options of TRL without a key in ztk. A reason where ztk behaves in another way than the default; "" where it does as the default.
WITHOUT: dict[str, str] = {
    "disable_dropout": DROPOUT,
    "assistant_only_loss": "`task=sft` learns the answers of a conversation. `sft.mask_prompts=false` learns all tokens, as TRL by default",
    "shuffle_dataset": "records are shuffled in every pass",
    "train_sampling_strategy": "records are shuffled in every pass",
    "logging_steps": "a row per step, `train.log_every`",
    "trust_remote_code": "",
    "router_aux_loss_coef": "`config.json` has it",
    "truncation_mode": WHOLE,
    "max_completion_length": WHOLE,
    "padding_free": "texts are packed without padding where the family keeps them apart",
    "pad_to_multiple_of": "rows are padded to a multiple of 8",
    "use_bias_correction_kl": "acts with `kl.coef` above 0 only",
}
_NAMES = """
    model_init_kwargs chat_template_path dataset_text_field dataset_kwargs dataset_num_proc eos_token packing packing_strategy eval_packing
    loss_type activation_offloading pad_token padding_value precompute_ref_batch_size loss_weights ld_alpha f_divergence_type
    f_alpha_divergence_coef use_weighting discopop_tau sync_ref_model ref_model_mixup_alpha ref_model_sync_steps generate_during_eval
    is_encoder_decoder alpha completion_only_loss teacher_model_name_or_path teacher_model_init_kwargs remove_unused_columns use_vllm
    cast_lm_head_to_fp32
    num_generations_eval ds3_gather_for_generation generation_batch_size steps_per_generation generation_kwargs chat_template_kwargs
    repetition_penalty cache_implementation num_iterations delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
    vespo_k_neg vespo_lambda_neg reward_weights multi_objective_aggregation top_entropy_quantile entropy_coef use_adaptive_entropy
    entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations off_policy_mask_threshold
    log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged
"""
WITHOUT |= dict.fromkeys(_NAMES.split(), "")
VLLM = "vllm_"  # options of an engine that ztk has not
# Defaults that mean the same with other words. (TRL's, ztk's)
SAME = [
    (None, 0.0),  # a coefficient that is not given
    (["sigmoid"], "sigmoid"),
    ("dapo", "tokens"),
    (False, "frozen"),
    (None, True),  # completion_only_loss
]


def default_of(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def config_of(choice: str, *, folder: Path) -> Config:
    """Composes a run of a model of transformers, with records of the task."""
    rows = {
        "sft": {"prompt": "ab", "answer": "cd"},
        "distill": {"prompt": "ab", "answer": "cd"},
        "grpo": {"prompt": "ab"},
        "kto": {"prompt": "ab", "completion": "c", "label": True},
    }
    task, kind = choice.split(maxsplit=1)[0].partition("=")[2], choice.rpartition("=")[2]
    row = rows.get(kind, rows.get(task, {"prompt": "ab", "chosen": "c", "rejected": "d"}))
    (folder / f"{kind}.jsonl").write_text(f"{json.dumps(row)}\n" * 100)
    (folder / "mine.py").write_text("def score(completions):\n    return [0.0] * len(completions)\n")
    words = [*choice.split(), "model=hf", f"model.path={folder / 'model'}", f"data.path={folder / kind}.jsonl"]
    if task == "grpo":
        words += [f"reward.function={folder / 'mine.py'}:score", "rollout.task=null"]
    if task == "distill":
        words += [f"distill.teacher={folder / 'model'}"]
    return compose(*words, output_dir=str(folder / "run"), machine=Machine(gpus=1, cores=8))


def value_of(config: Config, *, key: str) -> Any:
    name, _, index = key.rpartition(".")
    found = read(config, key=name)[int(index)] if index.isdecimal() else read(config, key=key)
    return found.value if isinstance(found, Enum) else found


def shown(value: Any) -> str:
    if isinstance(value, list):
        value = value[0]
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def rows_of(name: str, *, folder: Path) -> Iterator[tuple[str, Any, str, Any, str]]:
    """Yields (option, TRL's default, key, ztk's, reason) for the options with a counterpart.

    Raises AssertionError for an option that is neither here nor in `WITHOUT`, and for another default without a reason.
    """
    import transformers

    module, choice = CHOICES[name]
    config = config_of(choice, folder=folder)
    fields = {field.name: default_of(field) for field in dataclasses.fields(getattr(import_module(module), name))}
    usual = {field.name: default_of(field) for field in dataclasses.fields(transformers.TrainingArguments)}
    known = OWN[name] | {option: entry for option, entry in COMMON.items() if option in fields}
    added = {option for option, value in fields.items() if option not in usual or value != usual[option]}
    unsorted = {option for option in added - known.keys() - WITHOUT.keys() if not option.startswith(VLLM)}
    assert not unsorted, f"{name} has options that the page lacks: {sorted(unsorted)}"
    for option in [*COMMON, *OWN[name]]:
        if option in fields:
            key, reason = known[option]
            theirs, ours = fields[option], "the longest text" if key == "data.seq_len" else value_of(config, key=key)
            theirs = theirs.value if isinstance(theirs, Enum) else theirs
            is_same = theirs == ours or any(theirs == left and ours == right for left, right in SAME)
            assert is_same or reason, f"{name}.{option}: TRL has {theirs}, {key} is {ours}, and the page has no reason"
            yield option, theirs, key.removesuffix(".0").removesuffix(".1"), ours, reason if theirs != ours else ""


def page() -> str:
    """Returns the page."""
    import trl

    lines = [HEAD.format(version=".".join(trl.__version__.split(".")[:2]))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder / "model")
        tables = {name: list(rows_of(name, folder=folder)) for name in CHOICES}
    first, *others = tables.values()
    equal = {row[0] for row in first if all(row in other for other in others)}
    lines += ["## All trainers", "", *_table(row for row in first if row[0] in equal), ""]
    for name, rows in tables.items():
        lines += [f"## `{name}`: `{CHOICES[name][1]}`", "", *_table(row for row in rows if row[0] not in equal), ""]
    lines += ["## Options without a key in ztk", "", "ztk does something else than the default of these:", ""]
    lines += [
        "| TRL | ztk |",
        "| --- | --- |",
        *(f"| `{name}` | {text} |" for name, text in sorted(WITHOUT.items()) if text),
    ]
    rest = ", ".join(f"`{name}`" for name, text in sorted(WITHOUT.items()) if not text)
    lines += ["", f"Of these it has the default's behaviour alone: {rest}, and the options of vLLM.", ""]
    return "\n".join(lines)


def _table(rows: Any) -> list[str]:
    head = ["| option | TRL | ztk | key | reason |", "| --- | --- | --- | --- | --- |"]
    return [
        *head,
        *(
            f"| `{option}` | {shown(theirs)} | {shown(ours)} | `{key}` | {why} |"
            for option, theirs, key, ours, why in rows
        ),
    ]


def save_model(folder: Path) -> None:
    """Saves a small model with room for long texts."""
    from transformers import LlamaForCausalLM

    config = small.llama_config()
    config.max_position_embeddings = 4096
    LlamaForCausalLM(config).save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
