"""Runs of `task=grpo` and `task=ppo`: the same bits at every stage and on every number of ranks, resumed runs, faults."""

import json
import re
import tempfile

import pytest
import torch

from tests.rl.rollout.runs import REWARD, config_of, play, rows_of
from ztk.core.policies.rollout import KlEstimator, KlPlace, RolloutEngineName, RolloutWeights, StageName
from ztk.core.policies.tier import Tier
from ztk.core.runtime import Process
from ztk.experiments import grpo
from ztk.experiments.prompts import Prompts
from ztk.inference.products import Product
from ztk.rl.rollout import Samples

LAYOUTS = {
    "stage1": {"zero__stage": 1, "zero__overlap_gather": True},
    "stage2": {"zero__stage": 2, "zero__overlap_gather": True},
    "stage3": {"zero__stage": 3},
    "trainer": {"zero__stage": 3, "rollout__engine": RolloutEngineName.trainer},
    "streamed": {
        "zero__stage": 3,
        "rollout__engine": RolloutEngineName.trainer,
        "rollout__weights": RolloutWeights.streamed,
    },
    "cpu": {"zero__stage": 3, "offload__optimizer": "cpu", "offload__parameters": "cpu"},
    "selective": {"recompute__mode": "selective"},
    "full": {"zero__stage": 3, "recompute__mode": "full"},
}
NVME = ("zero=stage3", "offload=nvme", f"offload.nvme_path={tempfile.gettempdir()}")


OTHERS = {  # models besides the policy, which stays at stage 0
    "critic__zero": StageName.stage3,
    "critic__offload": Tier.nvme,
    "reference__zero": StageName.stage3,
    "reference__offload": Tier.cpu,
}


def samples_of(result: list[dict], *, rollout: int) -> list[dict]:
    """The samples of all ranks in the order of their numbers: tokens, log-probabilities, reward."""
    parts = Samples.joined([Samples.from_json(rank["rollouts"][rollout]) for rank in result])
    ordered = parts[parts.numbers.argsort()]
    return [
        {"tokens": tokens.tolist(), "logprobs": logprobs.tolist(), "reward": reward.item()}
        for tokens, logprobs, reward in zip(ordered.tokens, ordered.logprobs, ordered.rewards, strict=True)
    ]


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory):
    """`plain(task, world_size)`: a run at stage 0, and its rows."""
    made = {}

    def run(task: str, world_size: int):
        if (task, world_size) not in made:
            folder = tmp_path_factory.mktemp(f"{task}{world_size}")
            config = config_of(task, folder=folder, ranks=world_size)
            made[task, world_size] = ranks(world_size).run(play, config=config), rows_of(folder)
        return made[task, world_size]

    return run


@pytest.mark.parametrize(
    ("task", "world_size", "layout"),
    [
        *[("grpo", 2, layout) for layout in LAYOUTS],
        ("grpo", 1, "stage3"),
        ("ppo", 2, "stage3"),
        ("ppo", 2, "nvme"),
        ("ppo", 1, "selective"),
    ],
)
def test_samples_and_losses_have_the_same_bits_in_every_layout(task, world_size, layout, plain, ranks, tmp_path):
    result, rows = plain(task, world_size)
    options, changes = ((), LAYOUTS[layout]) if layout in LAYOUTS else (NVME, {"offload__nvme_path": str(tmp_path)})
    config = config_of(task, *options, folder=tmp_path, ranks=world_size, **changes)
    found = ranks(world_size).run(play, config=config)
    for rollout in range(2):
        assert samples_of(found, rollout=rollout) == samples_of(result, rollout=rollout)
    assert rows_of(tmp_path) == rows


def play_on_another_processor(process: Process, *, config) -> tuple[dict, str | None]:
    """Products of the inference engine have other bits. Returns the run and the text of `settle_drawer`."""
    multiply, settle, said = Product.multiply, grpo.settle_drawer, []
    Product.multiply = lambda self, x: multiply(self, x) * (1 + 2**-23)
    grpo.settle_drawer = lambda run: said.append(settle(run)) or said[-1]
    try:
        return play(process, config=config), said[0]
    finally:
        Product.multiply, grpo.settle_drawer = multiply, settle


def test_the_trainer_draws_where_the_inference_engine_has_other_bits(plain, ranks, tmp_path):
    ((_, said),) = ranks(1).run(play_on_another_processor, config=config_of("grpo", folder=tmp_path))
    assert "on this processor the inference engine has other bits" in said
    assert rows_of(tmp_path) == plain("grpo", 1)[1]


def test_other_models_than_the_policy_may_have_their_own_strategy(plain, ranks, tmp_path):
    result, rows = plain("ppo", 2)
    config = config_of("ppo", folder=tmp_path, ranks=2, offload__nvme_path=str(tmp_path / "nvme"), **OTHERS)
    found = ranks(2).run(play, config=config)
    assert samples_of(found, rollout=1) == samples_of(result, rollout=1) and rows_of(tmp_path) == rows
    assert len(rows) == 4 and all(row["rollout_differing"] == 0 for row in rows)
    assert rows[0]["grad_norm"] > 0 and rows[0]["kl"] == 0 != rows[-1]["kl"] and rows[1]["loss"] != rows[0]["loss"]


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_the_first_samples_do_not_depend_on_the_number_of_ranks(task, plain, ranks, tmp_path):
    changes = {"train__micro_batch_size": 2, "train__steps": 1}  # of 8 answers of a step each rank has 2
    four = ranks(4).run(play, config=config_of(task, folder=tmp_path, ranks=2, **changes))
    one, two, more = (samples_of(found, rollout=0) for found in (plain(task, 1)[0], plain(task, 2)[0], four))
    for key in ("tokens", "reward"):
        assert [row[key] for row in one] == [row[key] for row in two] == [row[key] for row in more]
    assert len({tuple(row["tokens"]) for row in one}) > 8  # of 16


def test_the_samples_do_not_depend_on_the_size_of_micro_batches(plain, ranks, tmp_path):
    changes = {"train__micro_batch_size": 2, "train__accumulation_steps": 4}
    trainer = RolloutEngineName.trainer
    config = config_of("grpo", folder=tmp_path, train__steps=1, rollout__engine=trainer, **changes)
    found = ranks(1).run(play, config=config)
    one, two = (samples_of(result, rollout=0) for result in (plain("grpo", 1)[0], found))
    assert one == two  # log-probabilities included, whatever a text is packed with


def test_the_bits_of_the_reference_stay(plain):
    digests = [digest for rank in plain("grpo", 2)[0] for digest in rank["references"]]
    assert len(digests) == 4 and len(set(digests)) == 1


@pytest.mark.parametrize(("task", "world_size", "stage"), [("grpo", 1, 0), ("ppo", 2, 3), ("ppo", 1, 1)])
def test_a_run_resumed_in_the_middle_of_a_buffer_equals_the_uninterrupted_one(task, world_size, stage, ranks, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    changes = {"ranks": world_size, "zero__stage": stage, "train__steps": 5, "checkpoint__every": 3}
    straight = ranks(world_size).run(play, config=config_of(task, folder=first, **changes))
    saved = str(first / "checkpoints" / "step-000003")
    config = config_of(task, folder=second, checkpoint__resume=saved, **changes)
    resumed = ranks(world_size).run(play, config=config)
    assert rows_of(second) == rows_of(first)[3:]
    assert samples_of(resumed, rollout=0) == samples_of(straight, rollout=2)  # step 4 uses up the second one
    for key in ("loss_digest", "reward_before", "reward_after"):
        assert resumed[0]["summary"][key] == straight[0]["summary"][key]


def test_a_save_that_ends_before_the_policys_leaves_the_last_one_complete(plain, ranks, tmp_path):
    changes = {"folder": tmp_path, "checkpoint__every": 1, "checkpoint__keep": 1}
    (died,) = ranks(1).run(play, config=config_of("ppo", **changes), dies=3, fails=True)
    assert "died in the middle" in died["error"]
    ranks(1).run(play, config=config_of("ppo", checkpoint__resume="auto", **changes))
    assert rows_of(tmp_path) == plain("ppo", 1)[1]


def test_one_changed_bit_stops_the_run_and_is_named(ranks, tmp_path):
    config = config_of("grpo", folder=tmp_path)
    (found,) = ranks(1).run(play, config=config, planted=5, fails=True)
    said = r"RolloutMismatch: step 1: 1 log-probabilities .* sample 5, position 7 \(token \d+\): the rollout"
    assert re.match(said, found["error"])


def play_with_a_fault(process: Process, *, config, layer: str) -> dict:
    """Changes the last bit of the output of `layer` while the policy trains."""
    open_run = grpo.open_run

    def opened(*args, **options):
        run = open_run(*args, **options)
        one_up = lambda part, args, out: torch.nextafter(out, torch.tensor(9.0)) if part.training else out  # noqa: E731
        run.actor.module.get_submodule(layer).register_forward_hook(one_up)
        return run

    grpo.open_run = opened
    try:
        return play(process, config=config, fails=True)
    finally:
        grpo.open_run = open_run


@pytest.mark.parametrize("stage", [0, 3])
def test_the_layer_that_differs_is_named(stage, ranks, tmp_path):
    config = config_of("grpo", folder=tmp_path, zero__stage=stage)
    error = ranks(1).run(play_with_a_fault, config=config, layer="blocks.1.attention")[0]["error"]
    assert "is blocks.1.attention (" in error and ", from position 0 on. Use rollout.identity=corrected" in error


@pytest.mark.parametrize("identity", ["corrected", "off"])
def test_where_bits_may_differ_they_are_counted(identity, ranks, tmp_path):
    config = config_of("grpo", f"rollout.identity={identity}", folder=tmp_path)
    ranks(1).run(play, config=config, planted=5)
    assert [row["rollout_differing"] for row in rows_of(tmp_path)] == [1] * 4


@pytest.mark.parametrize(
    ("step", "limit", "said"),
    [
        (3, {"rollout__stop_entropy_below": 100.0}, "the policy's entropy is"),
        (1, {"kl__stop_above": -1.0}, "the KL divergence to the reference is 0.000"),  # at once
    ],
)
def test_a_guard_saves_and_the_resumed_run_draws_the_same_rollout_again(step, limit, said, plain, ranks, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    config = config_of("grpo", folder=first, **limit)
    (found,) = ranks(1).run(play, config=config, fails=True)
    assert f"RolloutStopped: step {step}: {said}" in found["error"] and "A checkpoint is in" in found["error"]
    ranks(1).run(play, config=config_of("grpo", folder=second, checkpoint__resume=str(first)))
    assert rows_of(second) == plain("grpo", 1)[1][step - 1 :]


def test_answers_without_a_reward_are_left_out(ranks, tmp_path):
    reward = REWARD.replace("return", "return None if record['number'] % 2 else")
    ranks(1).run(play, config=config_of("grpo", folder=tmp_path, reward=reward, train__steps=1))
    (row,) = rows_of(tmp_path)
    assert row["excluded"] == 0.5 and row["equal_groups"] == 0.5


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("None", "RolloutStopped: step 1: the reward function returned None for every answer"),
        ("0 / 0", r"RewardError: the reward function score raised ZeroDivisionError: .* for prompt '\w+>', answer"),
        (
            "float('nan')",
            "RewardError: the reward function score returned nan, a number that is not finite, for prompt",
        ),
    ],
)
def test_a_reward_function_that_fails_stops_the_run(value, said, ranks, tmp_path):
    reward = f"def score(prompt, answer, record):\n    return {value}\n"
    config = config_of("ppo", folder=tmp_path, reward=reward, train__steps=1)
    (found,) = ranks(1).run(play, config=config, fails=True)
    assert re.match(said, found["error"])


@pytest.mark.parametrize("algorithm", ["dr_grpo", "dapo", "gspo", "rloo", "cispo"])
def test_every_algorithm_moves_the_policy(algorithm, ranks, tmp_path):
    ranks(1).run(play, config=config_of("grpo", f"algorithm={algorithm}", folder=tmp_path, train__steps=3))
    rows = rows_of(tmp_path)
    assert rows[0]["grad_norm"] > 0 and rows[2]["kl"] != 0


@pytest.mark.parametrize(
    "changes",
    [
        {"policy__dual_clip": 3.0, "kl__place": KlPlace.loss, "kl__estimator": KlEstimator.k3_weighted},
        {"kl__place": KlPlace.reward, "kl__estimator": KlEstimator.k2},
    ],
)
def test_a_divergence_takes_part(changes, plain, ranks, tmp_path):
    """In the first rollout the policy is the reference, so its reward has no penalty."""
    ranks(1).run(play, config=config_of("grpo", folder=tmp_path, kl__coef=0.5, **changes))
    rows, others = rows_of(tmp_path), plain("grpo", 1)[1]
    assert rows[0]["reward"] == others[0]["reward"] and rows[3]["grad_norm"] != others[3]["grad_norm"]


def test_texts_are_shown_where_a_rollout_serves_several_steps(ranks, tmp_path):
    """Rollouts begin at steps 1, 3 and 5, each for two; texts are shown every fourth step, and at the first."""
    ranks(1).run(play, config=config_of("grpo", folder=tmp_path, rollout__show_every=4, train__steps=6))
    shown = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert shown == [1] * 4 + [3] * 4


def test_a_critic_needs_one_answer_to_a_prompt(ranks, tmp_path):
    """Six rollouts: a single answer is not dropped as a group of equal answers."""
    given = ("rollout.prompts=16", "rollout.group_size=1")
    ranks(1).run(play, config=config_of("ppo", *given, folder=tmp_path, train__steps=12))
    assert {row["equal_groups"] for row in rows_of(tmp_path)} == {0.0}


def test_prompts_of_a_file(ranks, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": word, "id": word}) + "\n" for word in ("abc", "de", "fghij")))
    reward = "def score(prompt, answer, record):\n    assert record['id'] == prompt\n    return len(answer)\n"
    given = {"rollout__task": None, "data__path": [str(file)], "rollout__show_every": 1, "train__steps": 1}
    config = config_of("grpo", folder=tmp_path, reward=reward, **given)
    ranks(1).run(play, config=config)
    shown = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {row["prompt"] for row in shown} == {"abc", "de", "fghij"} and len(shown) == 4
    for text, said in (
        ('{"prompt": "abcdefg"}\n', "use data.seq_len=13"),
        ('{"prompt": "a"}\n{"text": "a"}\n', "line 2: its fields are text"),
        ("abc\n", "line 1: not JSON"),
        ("", "there are no records"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            Prompts(config)
