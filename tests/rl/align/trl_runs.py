"""Runs of task=sft, reward, dpo and distill by ztk and by TRL's trainers: one model, same texts and order, fp32, one process.

`test_trl.py` and tests/slow/test_trl.py compare the losses, `scripts/bench_trl.py` the speeds. Needs `pip install trl`.
"""

import contextlib
import copy
import functools
import io
import json
import operator
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import datasets
import tokenizers
import torch
import transformers
import trl

from ztk.checkpoint.llama import TO_LLAMA, llama_config
from ztk.config import Config
from ztk.core.runtime import Process
from ztk.experiments.alignment import open_stream
from ztk.experiments.distill import DistillStream
from ztk.experiments.examples import ExampleStream, Step
from ztk.experiments.models import build, full_values
from ztk.experiments.prompts import PAD, STOP
from ztk.rl.align import Sequences

TOLERANCE = 1e-5
COMMON = (
    *("model.dim=32", "model.heads=2", "model.kv_heads=2", "model.hidden_dim=64", "train.global_batch_size=16"),
    *("train.micro_batch_size=16", "optimizer.lr=1e-3", "scheduler=constant", "scheduler.warmup_steps=0"),
    *("train.eval_every=0", "train.eval_batches=1", "launch.ranks=1", "launch.device=cpu", "logger=disabled"),
)
DPO = ("task=dpo", "warm_start.steps=0", "dpo.beta=0.3", "dpo.sft_weight=0")
TEACHER = "{teacher}"  # in choices: stands for the folder of `with_teacher`
DISTILL = ("task=distill", "distill.fraction=0", f"distill.teacher={TEACHER}")
# Case -> ztk's choices, TRL's.
CASES = {
    "sft": (("task=sft",), {}),
    "sft, prompts counted": (("task=sft", "sft.mask_prompts=false"), {}),
    "reward": (("task=reward",), {}),
    "reward, margin and centring": (
        ("task=reward", "reward.margin=0.5", "reward.centring=0.01"),
        {"center_rewards_coefficient": 0.01},
    ),
    "dpo": (DPO, {}),
    "dpo, hinge": ((*DPO, "dpo.loss=hinge"), {"loss_type": ["hinge"]}),
    "dpo, ipo per token": ((*DPO, "dpo.loss=ipo", "dpo.length_normalised=true"), {"loss_type": ["ipo"]}),
    "dpo, per token": ((*DPO, "dpo.length_normalised=true"), {"loss_type": ["sigmoid_norm"]}),
    "dpo and sft": ((*DPO[:-1], "dpo.sft_weight=0.5"), {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "simpo": (
        (*DPO, "dpo.loss=simpo", "dpo.beta=2", "dpo.margin=1"),
        {"loss_type": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "simpo and sft": (
        (*DPO[:-1], "dpo.loss=simpo", "dpo.sft_weight=0.5"),
        {"loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.5},
    ),
    "orpo": ((*DPO[:-1], "dpo.loss=orpo", "dpo.sft_weight=1"), {}),
    "kto": ((*DPO[:-1], "dpo.loss=kto", "dpo.beta=0.5", "dpo.undesirable_weight=0.75"), {"undesirable_weight": 0.75}),
    "distill, forward": ((*DISTILL, "distill.beta=0"), {"beta": 0.0, "lmbda": 0.0}),
    "distill, reverse": ((*DISTILL, "distill.beta=1"), {"beta": 1.0, "lmbda": 0.0}),
    "distill": ((*DISTILL, "distill.beta=0.3"), {"beta": 0.3, "lmbda": 0.0}),
    "distill, own draws": ((DISTILL[0], DISTILL[2], "distill.fraction=1"), {"beta": 0.5, "lmbda": 0.0}),
}


@dataclass(kw_only=True)
class Losses:
    """Losses, seconds and tokens (without padding) per step. texts: examples of task=distill in TRL's format."""

    losses: list[float] = field(default_factory=list)
    texts: list[dict] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The median tokens per second without the first step, which warms up, and the last, whose end ztk's stream cannot measure."""
        return statistics.median(map(operator.truediv, self.tokens[1:-1], self.seconds[1:]))


def with_teacher(words: Sequence[str], *, folder: str) -> list[str]:
    """Replaces `TEACHER` by the folder of a transformers model, which is wider and has one layer. Creates it if needed."""
    path = Path(folder, "teacher")
    if any(TEACHER in word for word in words):
        torch.manual_seed(1)
        sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
        shape = transformers.LlamaConfig(**sizes, vocab_size=256, initializer_range=0.3, pad_token_id=PAD)
        transformers.LlamaForCausalLM(shape).save_pretrained(path)
    return [word.replace(TEACHER, str(path)) for word in words]


def run_both(config: Config, *, process: Process, folder: str, options: dict) -> tuple[Losses, Losses]:
    """ztk's run and TRL's run on the same texts, which task=distill may draw itself."""
    with contextlib.redirect_stdout(io.StringIO()):  # two programs' tables
        data = None if config.task.name == "distill" else texts_of(config, process=process)
        ours = run_ztk(config, process=process)
        data = datasets.Dataset.from_list(ours.texts) if data is None else data
        theirs = run_trl(config, process=process, folder=folder, options=options, data=data)
    written = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    ours.losses, theirs.tokens = [row["loss"] for row in written], ours.tokens
    return ours, theirs


def run_ztk(config: Config, *, process: Process) -> Losses:
    """Runs ztk. A step lasts from the arrival of its texts to the request for the next ones."""
    found, started, next_step = Losses(), [0.0], ExampleStream.next_step

    def timed(stream: ExampleStream) -> Step:
        now = time.perf_counter()
        if found.tokens:
            found.seconds.append(now - started[0])
        step = next_step(stream)
        found.tokens.append(step.num_tokens)
        started[0] = time.perf_counter()
        return step

    next_answers = DistillStream.next_step

    def recorded(stream: DistillStream) -> Step:
        step = next_answers(stream)
        found.texts += [record for batch in step.micro_batches for record in records_of(batch.sequences)]
        return step

    ExampleStream.next_step, DistillStream.next_step = timed, recorded
    try:
        import_module(config.task.module).run(copy.deepcopy(config), process=process)
    finally:
        ExampleStream.next_step, DistillStream.next_step = next_step, next_answers
    return found


def records_of(sequences: Sequences) -> list[dict]:
    """Texts and labels of the trained tokens in TRL's format."""
    parts = (values.split(sequences.lengths.tolist()) for values in (sequences.tokens, sequences.answer))
    return [
        {"input_ids": ids.tolist(), "labels": torch.where(mask, ids, -100).tolist()}
        for ids, mask in zip(*parts, strict=True)
    ]


def run_trl(config: Config, *, process: Process, folder: str, options: dict, data: datasets.Dataset) -> Losses:
    """Runs TRL's trainer from the first parameters of ztk's run. data: its examples."""
    is_reward = config.task.name == "reward"
    engine = build(config, process=process, is_trained=False, is_critic=is_reward)
    values = full_values(engine)
    shape = engine.module.config
    engine.close()
    model = llama_of(values, shape=shape, is_reward=is_reward)
    kind, settings = trainer_of(config)
    record = Losses()

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            record.seconds.append(time.perf_counter() - self.started)

    class Recording(kind):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            record.losses.append((found[0] if isinstance(found, tuple) else found).item())
            return found

        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    optimizer = config.optimizer
    arguments = settings(
        output_dir=folder,
        max_steps=config.train.steps,
        per_device_train_batch_size=config.train.global_batch_size,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad_norm,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        **({"beta": config.dpo.beta} if config.task.name == "dpo" else {}),
        **options,
    )
    has_reference = config.task.name == "dpo" and config.dpo.loss not in ("simpo", "orpo")
    extra = {"ref_model": copy.deepcopy(model)} if has_reference else {}
    if config.task.name == "distill":
        teacher = transformers.AutoModelForCausalLM.from_pretrained(config.distill.teacher, dtype=torch.float32)
        extra = {"teacher_model": teacher, "data_collator": transformers.DataCollatorForSeq2Seq(byte_tokenizer())}
    if config.dpo.loss == "kto":
        arguments.train_sampling_strategy = "sequential"
    trainer = Recording(
        model=model,
        args=arguments,
        train_dataset=data,
        processing_class=byte_tokenizer(),
        callbacks=[Clock()],
        **extra,
    )
    trainer.train()
    return record


def trainer_of(config: Config) -> tuple[type, type]:
    """TRL's trainer class and its settings class."""
    if config.dpo.loss == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOTrainer, CPOConfig
    if config.dpo.loss == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig
    if config.dpo.loss == "kto":
        return trl.KTOTrainer, trl.KTOConfig
    if config.task.name == "distill":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        return GKDTrainer, GKDConfig
    return {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
    }[config.task.name]


def texts_of(config: Config, *, process: Process) -> datasets.Dataset:
    """The run's examples in order and in TRL's format."""
    stream, records = open_stream(config, process=process), []
    for _ in range(config.train.steps):
        for batch in stream.next_step().micro_batches:
            sequences = batch.sequences
            tokens, masks = (
                values.split(sequences.lengths.tolist()) for values in (sequences.tokens, sequences.answer)
            )
            if config.task.name == "sft":
                records += records_of(sequences)
                continue
            if config.dpo.loss == "kto":
                for ids, mask, label in zip(tokens, masks, batch.labels.tolist(), strict=True):
                    start = int(mask.nonzero()[0])
                    texts = {"prompt": ids[:start], "completion": ids[start:]}
                    records.append(
                        {key: bytes(part.tolist()).decode() for key, part in texts.items()} | {"label": label}
                    )
                continue
            half = len(tokens) // 2
            for chosen, rejected, mask in zip(tokens[:half], tokens[half:], masks[:half], strict=True):
                start = int(mask.nonzero()[0])
                if config.task.name == "reward":
                    margin = {"margin": config.reward.margin} if config.reward.margin else {}
                    records.append({"chosen_ids": chosen.tolist(), "rejected_ids": rejected.tolist(), **margin})
                else:
                    texts = {"prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:]}
                    records.append({key: bytes(ids.tolist()).decode() for key, ids in texts.items()})
    return datasets.Dataset.from_list(records)


def llama_of(values: dict[str, torch.Tensor], *, shape, is_reward: bool) -> transformers.PreTrainedModel:
    """The decoder's parameters in Hugging Face's classes."""
    settings = llama_config(asdict(shape)) | {"pad_token_id": PAD, "attn_implementation": "sdpa"}
    settings.pop("architectures")
    named = {}
    for name, value in values.items():
        renamed = functools.reduce(lambda found, rule: re.sub(*rule, found), TO_LLAMA.items(), name)
        named[renamed.replace("lm_head", "score") if is_reward else renamed] = value
    config = transformers.LlamaConfig(**settings, **({"num_labels": 1} if is_reward else {}))
    model = (transformers.LlamaForSequenceClassification if is_reward else transformers.LlamaForCausalLM)(config)
    left = model.load_state_dict(named, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}, left
    model.tie_weights()
    return model.float()


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per ASCII character, its code."""
    vocabulary = {chr(code): code for code in range(128)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=chr(1)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chr(STOP), pad_token=chr(PAD))
