"""Runs of task=grpo, and TRL's GRPOTrainer, which replays ztk's answers and rewards: one model and order, fp32, one process.

tests/slow/test_trl.py compares losses and gradient norms, `scripts/bench_trl.py` the speeds. Needs `pip install trl`.
"""

import contextlib
import io
import json
import math
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import torch
import transformers
import trl

from tests.rl.align.trl_runs import byte_tokenizer, llama_of
from ztk.config import Config, Machine, compose
from ztk.core.runtime import Process
from ztk.experiments import grpo, rollouts
from ztk.experiments.grpo import Update, update_policy
from ztk.experiments.models import build, full_values, warm_start
from ztk.experiments.policy_run import Run
from ztk.experiments.prompts import STOP
from ztk.nn import Decoder
from ztk.rl.rollout import Samples

NORM_TOLERANCE = 1e-5  # relative, of a gradient norm: the two programs sum in different orders
CPU = Machine(gpus=0, cores=2)
COMMON = (
    *("task=grpo", "logger=disabled", "launch.ranks=1", "launch.device=cpu", "scheduler=constant", "scheduler.warmup_steps=0"),
    *("rollout.show_every=0", "optimizer.lr=1e-3", "optimizer.weight_decay=0"),
    "rollout.stop_truncated_above=null",  # the comparison does not need to learn
)  # fmt: skip
# eps: AdamW's first step divides a gradient by its own size. With the default of 1e-8, a gradient that is zero but for rounding moves its
# weight by the learning rate in a random direction: the norms of step 2 then differ by 2e-4 with AVX2, with 1e-5 by 1e-7.
SMALL = (
    *("model.dim=32", "model.heads=2", "model.kv_heads=2", "model.hidden_dim=64", "rollout.prompts=8", "rollout.group_size=4"),
    *("data.seq_len=14", "warm_start.steps=60", "warm_start.lr=1e-2", "warm_start.batch_size=32"),
    *("optimizer.eps=1e-5", "train.global_batch_size=16", "train.micro_batch_size=16"),  # two steps per rollout: the second's ratios are not 1
)  # fmt: skip
LONG = 192  # tokens per long prompt
ONE_STEP = ("rollout.prompts=4",)  # one optimizer step per rollout
# Case -> ztk's choices, TRL's.
CASES = {
    "grpo": ((), {"loss_type": "bnpo", "beta": 0.0}),
    "grpo, mean over answers": (("policy.average=sequence",), {"loss_type": "grpo", "beta": 0.0}),
    "grpo, weighted k3": (("kl.coef=0.3",), {"loss_type": "bnpo", "beta": 0.3}),
    "grpo, k3": (
        ("kl.coef=0.3", "kl.estimator=k3"),
        {"loss_type": "bnpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "dr_grpo": (("algorithm=dr_grpo",), {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}),
    "dapo": (
        ("algorithm=dapo", "rollout.drop_equal_groups=false", *ONE_STEP),  # TRL counts the tokens of equal groups
        {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True, "beta": 0.0},
    ),
    "gspo": (
        ("algorithm=gspo",),
        {
            **{"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0},
            **{"epsilon": 0.0003, "epsilon_high": 0.0004},
        },
    ),
    "cispo": (("algorithm=cispo", *ONE_STEP), {"loss_type": "cispo", "epsilon_high": 1.28, "beta": 0.0}),
}


@dataclass(kw_only=True)
class Record:
    """A trainer's numbers, one per optimizer step. training, generation: seconds per rollout. texts, answers: tokens per rollout, with and
    without prompts. longest: tokens of the longest answer per rollout."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    generation: list[float] = field(default_factory=list)
    texts: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    longest: list[int] = field(default_factory=list)


def run_both(
    choices: tuple[str, ...],
    *,
    process: Process,
    options: dict,
    generates: bool = False,
    ends: float | None = None,
) -> tuple[Record, Record]:
    """ztk's run and TRL's replay of it. With generates, TRL also draws answers and drops them. ends: probability that a
    token ends an answer."""
    with tempfile.TemporaryDirectory() as folder:
        reward = Path(folder, "mine.py")
        reward.write_text("def score(prompt, answer, record):\n    return (sum(answer.encode()) % 7) / 7\n")
        overrides = (*COMMON, *choices, f"reward.function={reward}:score")
        if "rollout.task=null" in choices:
            overrides += (f"data.path={write_prompts(Path(folder, 'prompts.jsonl'))}",)
        config = compose(*overrides, output_dir=folder, machine=CPU)
        values = warm_start(config, process=process)
        first = first_values(config, process=process, values=values, ends=ends)
        grpo.warm_start = lambda config, *, process: first.values
        with contextlib.redirect_stdout(io.StringIO()):  # two programs' tables
            ours, recorded = run_ztk(config, process=process)
            model = llama_of(first.values, shape=first.shape, is_reward=False)
            model.save_pretrained(Path(folder, "model"))
            theirs = replay(config, folder=folder, recorded=recorded, options=options, generates=generates)
    return ours, theirs


def write_prompts(path: Path) -> Path:
    """Writes prompts of `LONG` letters, all different."""
    letters = random.Random(0)
    texts = ("".join(letters.choices("abcdefghij", k=LONG)) for _ in range(64))
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@dataclass(frozen=True, kw_only=True)
class First:
    """The policy before its first step. shape: the decoder's configuration."""

    values: dict[str, torch.Tensor]
    shape: object


def first_values(
    config: Config, *, process: Process, values: dict[str, torch.Tensor] | None, ends: float | None = None
) -> First:
    """All parameters, as drawn from `train.seed` or after the supervised steps. ends: probability that a token ends an answer."""
    engine = build(config, process=process, values=values, is_trained=False)
    if ends is not None:
        let_answers_end(engine.module, length=config.data.seq_len, probability=ends)
    found = First(values=full_values(engine), shape=engine.module.config)
    engine.close()
    return found


@torch.no_grad()
def let_answers_end(decoder: Decoder, *, length: int, probability: float) -> None:
    """Makes `STOP` about as likely as `probability` after any text of up to `length` tokens.

    One element of the residual stream becomes constant except for norms, and `STOP` reads only it, with a weight fitted on random texts.
    """
    embedding, hidden = decoder.embedding.weight, []  # tied to the output layer
    embedding[:, 0] = embedding[:, 1:].square().sum(1).mean().sqrt()
    for name, weight in decoder.named_parameters():
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            weight[0] = 0
    handle = decoder.head.register_forward_pre_hook(lambda head, args: hidden.append(args[0].flatten(0, 1)))
    tokens = torch.randint(decoder.config.vocab_size, (32, length), generator=torch.Generator().manual_seed(0))
    logits = decoder(tokens).flatten(0, 1)
    handle.remove()
    logits[:, STOP] = -torch.inf
    wanted = logits.logsumexp(-1) + math.log(probability / (1 - probability))
    embedding[STOP] = 0
    embedding[STOP, 0] = (wanted / hidden[0][:, 0]).mean()


def run_ztk(config: Config, *, process: Process) -> tuple[Record, list[Samples]]:
    """The run that `config` describes, and the samples of its rollouts."""
    record, recorded = Record(), []
    draw, reward, rewarding = rollouts.next_samples, rollouts.reward, [0.0]

    def timed_draw(run: Run) -> Samples:
        started = time.perf_counter()
        samples = draw(run)
        record.generation.append(time.perf_counter() - started - rewarding[-1])
        return samples

    def timed_reward(run: Run, **options: object) -> None:
        started = time.perf_counter()
        reward(run, **options)
        rewarding.append(time.perf_counter() - started)

    def fill(run: Run, scored: rollouts.Scored) -> None:
        grpo.fill(run, scored)
        recorded.append(scored.samples)
        record.texts.append(int(scored.samples.lengths.sum()))
        record.answers.append(int(scored.samples.answer_lengths.sum()))
        record.longest.append(int(scored.samples.answer_lengths.max()))

    def update(run: Run) -> Update:
        started = time.perf_counter()
        updated = update_policy(run)
        record.training.append(time.perf_counter() - started)
        return updated

    grpo.next_samples, rollouts.reward = timed_draw, timed_reward
    try:
        grpo.run_task(config, process=process, fill=fill, update=update)
    finally:
        grpo.next_samples, rollouts.reward = draw, reward
    written = [json.loads(line) for line in Path(config.output_dir, "metrics.jsonl").read_text().splitlines()]
    record.losses, record.norms = [row["loss"] for row in written], [row["grad_norm"] for row in written]
    return record, recorded


def replay(config: Config, *, folder: str, recorded: list[Samples], options: dict, generates: bool) -> Record:
    """TRL's trainer from the model in `folder`, on the answers and rewards that ztk has recorded."""
    record, left, rewards = Record(), iter(recorded), []
    samples = config.rollout.prompts * config.rollout.group_size
    updates = samples // config.train.global_batch_size

    def recall(prompts: list[str], trainer: trl.GRPOTrainer) -> dict:
        drawn = next(left)
        texts = [row[:length].tolist() for row, length in zip(drawn.tokens, drawn.prompt_lengths.tolist(), strict=True)]
        answers = [
            row[start : start + length].tolist()
            for row, start, length in zip(
                drawn.tokens, drawn.prompt_lengths.tolist(), drawn.answer_lengths.tolist(), strict=True
            )
        ]
        rewards[:] = drawn.rewards.tolist()
        if generates:
            started = time.perf_counter()
            found, _ = trainer._generate_single_turn(texts, None, {}, config.rollout.group_size)
            record.generation.append(time.perf_counter() - started)
            record.answers.append(sum(len(answer) for answer in found))
            record.longest.append(max(len(answer) for answer in found))
        return {"prompt_ids": texts, "completion_ids": answers, "logprobs": None}

    def reward(**columns: list) -> list[float]:
        return rewards

    class Recording(trl.GRPOTrainer):
        started = 0.0

        def _prepare_inputs(self, batch):
            prepared = super()._prepare_inputs(batch)
            self.started = time.perf_counter()
            return prepared

        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            record.losses.append(found.item())
            return found

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            record.training.append(time.perf_counter() - trainer.started)

        def on_log(self, args, state, control, logs, **kwargs):
            if "grad_norm" in logs:
                record.norms.append(float(logs["grad_norm"]))

    optimizer, policy, rollout = config.optimizer, config.policy, config.rollout
    arguments = trl.GRPOConfig(
        **{
            "output_dir": folder,
            "max_steps": config.train.steps,
            "per_device_train_batch_size": config.train.global_batch_size,
            "steps_per_generation": updates,
            "num_generations": rollout.group_size,
            "max_completion_length": rollout.max_tokens,
            "temperature": rollout.temperature,
            "shuffle_dataset": False,
            "learning_rate": optimizer.lr,
            "lr_scheduler_type": "constant",
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "adam_epsilon": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "max_grad_norm": optimizer.clip_grad_norm,
            "epsilon": policy.clip_low,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_strategy": "steps",
            "logging_steps": 1,
            "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        }
        | options,
    )
    trainer = Recording(
        model=str(Path(folder, "model")),
        reward_funcs=[reward],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * (samples * config.train.steps)),
        processing_class=byte_tokenizer(),
        rollout_func=recall,
        callbacks=[Clock()],
    )
    trainer.train()
    return record
