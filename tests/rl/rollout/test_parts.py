"""The parts of a rollout that need no ranks: draws, buffer, rewards, guards."""

import pytest
import torch

from tests.rl.rollout.runs import config_of
from ztk.experiments.models import open_critic, replaced
from ztk.experiments.pretrain import build_model
from ztk.inference.sample import choose
from ztk.inference.uniforms import sample_keys, uniforms
from ztk.rl.rollout import (
    Buffer,
    GuardPolicy,
    Guards,
    Samples,
    compare,
    share_of_rank,
)


def samples(count: int = 4, *, length: int = 6) -> Samples:
    generator = torch.Generator().manual_seed(7)
    numbers = torch.arange(count)
    return Samples(
        tokens=torch.randint(0, 256, (count, length), generator=generator),
        numbers=numbers,
        prompts=numbers // 2,
        prompt_lengths=torch.full((count,), 2),
        answer_lengths=torch.arange(count) % 3 + 1,
        finished=numbers % 2 == 0,
        logprobs=-torch.rand(count, length, generator=generator),
        rewards=torch.rand(count, generator=generator, dtype=torch.float64),
        included=numbers != 1,
    )


# Draws


def keys(numbers: torch.Tensor, *, seed: int = 0, step: int = 0) -> torch.Tensor:
    return sample_keys(seed=seed, step=step, prompts=numbers // 8, samples=numbers % 8)


def test_a_draw_depends_on_its_own_counter_alone():
    numbers = torch.arange(64)
    together = uniforms(keys(numbers), positions=numbers % 5)
    apart = torch.cat([uniforms(keys(part), positions=part % 5) for part in numbers.flip(0).split(7)]).flip(0)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("changed", [{"seed": 1}, {"step": 1}])
def test_seed_and_step_change_every_draw(changed):
    numbers, positions = torch.arange(256), torch.zeros(256, dtype=torch.int64)
    first, second = (
        uniforms(keys(numbers), positions=positions),
        uniforms(keys(numbers, **changed), positions=positions),
    )
    assert (first != second).all()


def test_draws_are_uniform_and_independent_over_samples_and_positions():
    numbers = torch.arange(1 << 14)
    here, there = (uniforms(keys(numbers), positions=torch.full_like(numbers, p)) for p in (3, 4))
    assert len(torch.unique(here)) == len(here) and here.min() >= 0 and here.max() < 1
    # Of 16384 uniform numbers the mean has deviation 0.289 / 128; the correlation of independent ones 1 / 128. Bounds: 5 deviations.
    assert abs(here.mean() - 0.5) < 5 * 0.289 / 128
    assert abs(torch.corrcoef(torch.stack([here, there]))[0, 1]) < 5 / 128
    assert abs(torch.corrcoef(torch.stack([here[:-1], here[1:]]))[0, 1]) < 5 / 128


def test_the_counts_of_chosen_tokens_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.25])
    numbers = torch.arange(1 << 12)
    drawn = choose(
        probabilities.log().expand(len(numbers), -1),
        uniforms=uniforms(keys(numbers), positions=torch.zeros_like(numbers)),
    )
    counts = torch.bincount(drawn, minlength=4) / len(numbers)
    assert counts[2] == 0
    assert (counts - probabilities).abs().max() < 5 * 0.5 / 64  # 5 deviations of a fraction of 4096


# Buffer


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_buffer_continues_in_the_middle_on_other_numbers_of_ranks(world_size):
    everything, advantages = samples(8), torch.arange(8.0)
    own = [share_of_rank(updates=2, per_update=4, rank=rank, world_size=2) for rank in range(2)]
    buffers = [Buffer(updates=2) for _ in own]
    for buffer, numbers in zip(buffers, own, strict=True):
        buffer.fill(everything[numbers], advantages=advantages[numbers])
        buffer.position = 1
    parts = [buffer.state_dict(gather=lambda value: [value])["ranks"][0] for buffer in buffers]
    state = {"position": 1, "updates": 2, "ranks": parts}
    for rank in range(world_size):
        resumed = Buffer(updates=2)
        resumed.load_state_dict(state, per_update=4, rank=rank, world_size=world_size)
        numbers = share_of_rank(updates=2, per_update=4, rank=rank, world_size=world_size)
        assert resumed.position == 1 and not resumed.is_used_up
        assert torch.equal(resumed.extra["advantages"], advantages[numbers])
        assert resumed.samples.to_json() == everything[numbers].to_json()


def test_a_rollout_that_ranks_cannot_divide_is_refused():
    buffer = Buffer(updates=1)
    buffer.fill(samples(4))
    state = buffer.state_dict(gather=lambda value: [value])
    with pytest.raises(ValueError, match="4 samples, which 3 ranks cannot divide"):
        Buffer(updates=1).load_state_dict(state, per_update=4, rank=0, world_size=3)


@pytest.mark.parametrize(("updates", "per_update"), [(4, 2), (1, 8), (2, 8)])
def test_a_rollout_does_not_go_on_with_steps_of_another_size(updates, per_update):
    """Some samples would be used twice, or never; a rollout that is used up leaves nothing of either kind."""
    buffer, given = Buffer(updates=2), {"per_update": per_update, "rank": 0, "world_size": 1}
    buffer.fill(samples(8))
    buffer.position = 1
    resumed = Buffer(updates=updates)
    with pytest.raises(
        ValueError, match="in the middle of a rollout of 8 samples for 2 optimizer steps, and this run has"
    ):
        resumed.load_state_dict(buffer.state_dict(gather=lambda value: [value]), **given)
    buffer.position = 2
    resumed.load_state_dict(buffer.state_dict(gather=lambda value: [value]), **given)
    assert resumed.is_used_up


def test_the_answers_mask_covers_the_answer_alone():
    assert samples(3).answer_mask.int().tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]]


def test_one_bit_of_one_log_probability_is_found_and_named():
    rollout = samples(3)
    trainer = rollout.logprobs.clone()
    trainer[:, 0] += 1  # of the prompt: not compared
    assert compare(rollout, logprobs=trainer).count == 0
    trainer[1, 3] = torch.nextafter(trainer[1, 3], torch.tensor(0.0))
    found = compare(rollout, logprobs=trainer)
    assert found.count == 1 and found.first.startswith("sample 1, position 3 (token ")


# Guards

FINE = {"kl": 0.5, "entropy": 1.0, "truncated": 0.0, "excluded": 0.0, "equal_groups": 0.0}


@pytest.mark.parametrize(
    ("policy", "seen", "said"),
    [
        (GuardPolicy(kl_above=2.0), {"kl": 2.5}, "above kl.stop_above=2"),
        (GuardPolicy(), {"truncated": 0.95}, "95% of the answers were cut at rollout.max_tokens=8"),
        (GuardPolicy(), {"excluded": 1.0}, "returned None for every answer"),
        (GuardPolicy(entropy_below=0.1), {"entropy": 0.05}, "below rollout.stop_entropy_below=0.1"),
    ],
)
def test_a_guards_error_has_its_measurement(policy, seen, said):
    assert Guards(policy).fault(FINE, step=3, max_tokens=8) is None
    assert said in Guards(policy).fault(FINE | seen, step=3, max_tokens=8)


def test_equal_groups_stop_after_five_steps_in_a_row_also_across_a_resume():
    guards, equal = Guards(GuardPolicy()), FINE | {"equal_groups": 1.0}
    for step in range(4):
        assert guards.fault(equal, step=step, max_tokens=8) is None
    resumed = Guards(GuardPolicy())
    resumed.load_state_dict(guards.state_dict())
    assert "all answers to each prompt had equal rewards" in resumed.fault(equal, step=4, max_tokens=8)
    assert guards.fault(FINE, step=4, max_tokens=8) is None and guards.fault(equal, step=5, max_tokens=8) is None


def test_a_critic_that_begins_as_the_policy_keeps_its_own_output_layer(tmp_path):
    """An untied policy's output layer has the same name."""
    config = config_of("ppo", "model.tie_embeddings=false", folder=tmp_path, ranks=1)
    policy, _ = build_model(config)
    critic, drawn = open_critic(config)
    values = {name: torch.full(parameter.shape, 7.0) for name, parameter in policy.named_parameters()}
    first = replaced(drawn, values=values, model=critic)
    heads = [value(name="head.weight", start=0, stop=critic.head.weight.numel()) for value in (first, drawn)]
    assert policy.head.weight.shape != critic.head.weight.shape and torch.equal(*heads)
    assert first(name="norm.weight", start=0, stop=4).tolist() == [7.0] * 4
