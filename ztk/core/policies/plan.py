"""Keys of `plan`, and choices that a plan cannot trace."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ztk.core.policies.key import When, key, tasks
from ztk.core.policies.peers import Gradients, Kept, Logits, Way
from ztk.core.policies.ranges import COUNT, NOT_NEGATIVE, POSITIVE, Range
from ztk.core.policies.runs import is_hugging_face

_PLAN = tasks("plan")
_PLANNED = When(
    "task=plan and hardware=NAME",
    lambda config, machine: config.task.name == "plan" and config.hardware.name is not None,
)
_OWN_LOSS = When(
    "task=plan and hardware=NAME with a model of ztk",
    lambda config, machine: _PLANNED.test(config, machine) and not is_hugging_face(config.model),
)
_SELECTIVE = When(
    "task=plan, hardware=NAME and recompute=selective",
    lambda config, machine: _PLANNED.test(config, machine) and config.recompute.mode == "selective",
)
_RESIDENT = When(
    "task=plan, hardware=NAME and zero=stage0 or zero=stage1",
    lambda config, machine: _PLANNED.test(config, machine) and config.zero.stage in (0, 1),
)
_SEARCHES = When(
    "task=plan and plan.search=true",
    lambda config, machine: config.task.name == "plan" and bool(config.plan.search),
)


_ROLLOUT = When(
    "task=plan, hardware=NAME and plan.answers",
    lambda config, machine: _PLANNED.test(config, machine) and config.plan.answers is not None,
)


@dataclass(kw_only=True)
class PlanConfig:
    """Options of `task=plan`. `plan` is a group without named options, only keys."""

    acts: ClassVar = _PLANNED
    optional: ClassVar = True

    search: bool | None = key(
        "plan the best layouts (zero stage, offload, recompute and degrees of topology) of the same global batch, and rank them; null: false",
        acts=_PLAN,
    )
    way: Way | None = key(
        "how operations are computed: ztk, eager (PyTorch's), flash (eager, with flash-attn's norms and rotary positions), compiled "
        "(torch.compile) or tuned (Transformer Engine's, with a layer's collectives overlapped with its products), to plan another "
        "library's run; null: ztk"
    )
    fp8: bool | None = key("linear layers multiply in fp8, as torchao's do; null: false")
    fp8_gathers: bool | None = key(
        "parameters and the inputs of linear layers are gathered in fp8, as torchao's Float8Linear does; null: false",
        acts=When(
            "task=plan, hardware=NAME and plan.fp8=true",
            lambda config, machine: _PLANNED.test(config, machine) and bool(config.plan.fp8),
        ),
    )
    again: float | None = key(
        "share of a forward's products that another library computes again in a backward; null: 0",
        range=Range(low=0, high=1),
    )
    logits: Logits | None = key(
        "how another library's loss reads the logits: eager (an fp32 copy, torch's cross entropy), compiled (one pass), softmax (an fp32 "
        "copy, the softmax is kept) or held (in 16 bits, all columns, until the next micro-batch); null: ztk",
        acts=_OWN_LOSS,
    )
    kept: Kept | None = key(
        "results that recompute=selective keeps: products (of all products) or half (of every second one); null: products",
        acts=_SELECTIVE,
    )
    gradients: Gradients | None = key(
        "where another library's gradients wait at stages 0 and 1: ztk, or ddp (in .grad and in DistributedDataParallel's buckets, too); "
        "null: ztk",
        acts=_RESIDENT,
    )
    traced: int | None = key(
        "layouts that fit which plan.search=true plans for each number of ranks, trying at most twice as many; null: 8",
        range=Range(low=1, high=10_000),
        acts=_SEARCHES,
    )
    ranks: Any = key(
        "numbers of GPUs that plan.search=true chooses from, as in [8,16,24] or 8-64 (8, 16, 32, 64); null: launch.ranks",
        acts=_SEARCHES,
    )
    tokens: float | None = key(
        "tokens of the whole training; the plan prints its GPU hours and days; null: none", range=POSITIVE
    )
    budget_hours: float | None = key(
        "GPU hours that are available; the plan prints how many tokens they train; null: no limit", range=POSITIVE
    )
    answers: int | None = key(
        "answers of a rollout; the plan prints the seconds of drawing by servers, scoring, updates and transfer; null: no rollout",
        range=COUNT,
    )
    prompt_tokens: float | None = key("mean tokens of a prompt; null: 0", range=NOT_NEGATIVE, acts=_ROLLOUT)
    answer_tokens: float | None = key(
        "mean tokens of an answer; null: all of data.seq_len after the prompt", range=POSITIVE, acts=_ROLLOUT
    )
    scoring_models: float | None = key(
        "models of the policy's size that read every answer once, such as policy, reference and reward model; null: 2",
        range=NOT_NEGATIVE,
        acts=_ROLLOUT,
    )
    servers: int | None = key("servers that draw; null: 1", range=COUNT, acts=_ROLLOUT)
    server_hardware: str | None = key(
        "hardware of the servers, an option of hardware; null: the trainer's", acts=_ROLLOUT
    )
    server_devices: int | None = key("devices that share the model of a server; null: 1", range=COUNT, acts=_ROLLOUT)
    server_sequences: int | None = key("answers that a server draws at a time; null: 64", range=COUNT, acts=_ROLLOUT)


def rank_counts(value: Any) -> list[int]:
    """The numbers of ranks in `plan.ranks`, ascending. Raises ValueError for another form."""
    counts: list[Any] = []
    if isinstance(value, str) and re.fullmatch(r"\d+(-\d+)?", value):
        first, last = (int(part) for part in (value.split("-") * 2)[:2])
        counts = [first << power for power in range(32) if 0 < first << power <= last]
    elif isinstance(value, int):
        counts = [value]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        counts = list(value)
    if not counts or not all(
        type(count) is int and count > 0 for count in counts
    ):  # true and false are no numbers of ranks
        raise ValueError(f"plan.ranks={value}: must be a list as in [8,16,24], or FIRST-LAST as in 8-64, which doubles")
    return sorted(set(counts))


def rank_faults(plan: PlanConfig) -> Iterator[str]:
    """One line per fault of `plan.ranks`."""
    if plan.ranks is not None:
        try:
            rank_counts(plan.ranks)
        except ValueError as error:
            yield str(error)
