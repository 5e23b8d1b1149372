"""Environments: calls and their faults, turns as tokens, and runs whose answers have several turns."""

import asyncio
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.topology.families import make
from tests.rl.align.chats import PLAIN, save_tokenizer, train_tokenizer
from tests.rl.rollout.runs import config_of, play, rows_of, shortened
from tests.rl.rollout.test_runs import samples_of
from ztk.config import ConfigError, Machine, compose, prepare_environment
from ztk.core.policies.rollout import CorrectionName, RolloutEngineName, RolloutIdentity
from ztk.core.runtime import Process
from ztk.data import SubwordTokenizer
from ztk.experiments import policies
from ztk.experiments.rollouts import PROBED
from ztk.nn import Decoder
from ztk.rl.align import ChatTemplate, Encoding
from ztk.rl.rollout import EnvironmentFault, Environments, Episode, Samples, load_function

# Calls


def environments(make, *, seconds: float = 5.0) -> Environments:
    return Environments(make, name="rollout.environment=mine.py:Env", timeout_seconds=seconds)


def episodes(count: int = 1, *, said: Any = "p") -> list[Episode]:
    return [Episode(number=number, record={"id": number}, said=said) for number in range(count)]


def stepped(make, *, count: int = 1, said: Any = "p", seconds: float = 5.0):
    """The steps of fresh environments for the answers "a", and their episodes."""
    made, own = environments(make, seconds=seconds), episodes(count, said=said)
    made.reset(own)
    return made.step(own, answers=["a"] * count), own


def environment(step, *, reset=lambda self, prompt: None):
    return type("Env", (), {"step": step, "reset": reset})


def test_each_sample_has_an_instance_which_gets_its_prompt_and_columns():
    class Env:
        def reset(self, prompt, id):
            self.seen = [prompt, id]

        def step(self, action):  # whatever its name
            return f"{self.seen}{action}", None, False

    steps, own = stepped(Env, count=2)
    assert [step.observation for step in steps] == ["['p', 0]a", "['p', 1]a"] and own[0].environment is not own[
        1
    ].environment
    assert math.isnan(own[0].reward)  # no step has given one


@pytest.mark.parametrize("returned", ["other", [{"role": "system", "content": "s"}]])
def test_reset_may_replace_the_prompt(returned):
    _, (episode,) = stepped(environment(lambda self, answer: (None, 1, True), reset=lambda self, prompt: returned))
    assert episode.said == episode.asked == returned and episode.reward == 1.0


def test_an_observation_is_a_users_message_where_the_prompt_is_messages():
    [step], (episode,) = stepped(
        environment(lambda self, answer: ("seen", 0.5, False)), said=[{"role": "user", "content": "p"}]
    )
    assert step.observation == [{"role": "user", "content": "seen"}]
    episode.extend("a", observed=step.observation)
    assert [message["role"] for message in episode.answered] == ["assistant", "user"]


def test_slow_coroutines_are_awaited_for_all_samples_at_once():
    class Env:
        async def reset(self, prompt):
            await asyncio.sleep(0.5)

        async def step(self, answer):
            await asyncio.sleep(1)
            return None, 1.0, True

    started = time.monotonic()
    _, own = stepped(Env, count=128)
    assert time.monotonic() - started < 3 and sum(episode.reward for episode in own) == 128


def raising(self, answer):
    raise KeyError("no such tool")


async def raising_later(self, answer):
    raise KeyError("no such tool")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (raising, "step raised KeyError: 'no such tool', sample 0, turn 1, record {'id': 0}, answer 'a'"),
        (raising_later, "step raised KeyError: 'no such tool', sample 0, turn 1, record {'id': 0}, answer 'a'"),
        (lambda self, answer: 1.0, "step returned 1.0, sample 0, turn 1, record {'id': 0}: return observation, reward, done"),
        (lambda self, answer: ("o", math.nan, True), "the reward is a number that is not finite; it must be a finite number, or None"),
        (lambda self, answer: ("o", "1.0", True), "the reward is a str; it must be a finite number, or None"),
        (lambda self, answer: ("o", 1.0, "False"), "done is a str; it must be True or False"),
        (lambda self, answer: (None, 1.0, False), "return an observation as text or messages, or done=True"),
        (lambda self, answer: ([{"role": "tool"}], 1.0, False), "the prompt is a text, so return a text"),
    ],
)  # fmt: skip
def test_a_bad_step_is_named_with_sample_turn_and_answer(step, said):
    with pytest.raises(EnvironmentFault) as caught:
        stepped(environment(step))
    assert "rollout.environment=mine.py:Env" in str(caught.value) and said in str(caught.value)


def test_a_hanging_environment_stops_in_time():
    over = threading.Event()

    async def waits(self, answer):
        await asyncio.sleep(60)

    async def blocks(self, answer):
        over.wait(60)

    for step in (lambda self, answer: over.wait(60), waits, blocks):
        with pytest.raises(EnvironmentFault, match=r"step did not return within reward.timeout_seconds=0.1, sample 0"):
            stepped(environment(step), seconds=0.1)
        assert not over.is_set()  # raised while the step still waited
    with pytest.raises(EnvironmentFault, match="reset did not return within"):
        stepped(environment(raising, reset=lambda self, prompt: over.wait(60)), seconds=0.1)
    over.set()


def test_the_calculator_of_the_documentation_answers(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text()
    (tmp_path / "calculator.py").write_text(page[page.index("# calculator.py") :].partition("```")[0])
    made = environments(load_function(f"{tmp_path}/calculator.py:Calculator", key="rollout.environment"))
    [episode] = episodes(said=[{"role": "user", "content": "2 * 3 ?"}])
    episode.record = {"solution": 6}
    made.reset([episode])
    [first] = made.step([episode], answers=["<calc>2*3</calc>"])
    assert first.observation == [{"role": "tool", "content": "6"}] and not first.done
    [second] = made.step([episode], answers=["6"])
    assert second.done and episode.reward == 1.0 and episode.turns == 2


# Turns as tokens

ASKED = [{"role": "system", "content": "be short"}, {"role": "user", "content": "2 + 2 ?"}]
OBSERVED = [{"role": "tool", "content": "four"}, {"role": "user", "content": "well ?"}]
STRIPS = PLAIN.replace(
    "{{ message['content'] }}", "{{ message['content'] if loop.last else message['content'] | trim }}"
)


def opened(tmp_path, *, template: str) -> tuple[Any, Encoding]:
    trained = train_tokenizer()
    tokenizer = SubwordTokenizer.open(save_tokenizer(trained, path=tmp_path / "tokenizer", template=template))
    return trained, Encoding(tokenizer=tokenizer, by_template=True)


def joined(encoding: Encoding, *, answers: list[str]) -> list[int]:
    """The tokens of a conversation in which each answer is followed by OBSERVED."""
    said, tokens, tokenizer = list(ASKED), list(encoding.prompt(ASKED).tokens), encoding.tokenizer
    end = tokenizer.token_of(ChatTemplate.open(tokenizer.folder).required_end())
    for answer in answers:
        tokens += [*tokenizer.read(answer).tokens, end]
        tokens += encoding.between(said, observed=OBSERVED)
        said += [{"role": "assistant", "content": answer}, *OBSERVED]
    return tokens


def test_turns_have_the_tokens_of_the_whole_conversation_by_the_template(tmp_path):
    trained, encoding = opened(tmp_path, template=PLAIN)
    said = [
        *ASKED,
        {"role": "assistant", "content": "4"},
        *OBSERVED,
        {"role": "assistant", "content": "yes"},
        *OBSERVED,
    ]
    expected = trained.apply_chat_template(said, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert joined(encoding, answers=["4", "yes"]) == expected


def test_drawn_tokens_stay_where_a_template_rewrites_earlier_answers(tmp_path):
    trained, encoding = opened(tmp_path, template=STRIPS)
    said = [*ASKED, {"role": "assistant", "content": " 4"}, *OBSERVED]
    rewritten = trained.apply_chat_template(said, tokenize=True, add_generation_prompt=True, return_dict=False)
    drawn = encoding.prompt(ASKED).tokens + encoding.tokenizer.read(" 4").tokens
    found = joined(encoding, answers=[" 4"])
    assert found[: len(drawn)] == drawn and found != rewritten
    assert found[len(drawn) :] == rewritten[-(len(found) - len(drawn)) :]  # the rest is the template's


def test_turns_of_bytes_are_lines_of_roles_or_texts():
    between = bytes(Encoding().between(ASKED, observed=OBSERVED)).decode()
    assert between == "<|tool|>\nfour\n<|user|>\nwell ?\n<|assistant|>\n"
    assert bytes(Encoding().between("2+2=", observed="no: ")).decode() == "no: "


# Runs

LONG = ("rollout.max_tokens=24", "data.seq_len=36")


def config_with(name: str, *overrides: str, task: str = "grpo", **options):
    config = config_of(task, f"rollout.environment=tests.rl.rollout.played:{name}", *LONG, *overrides, **options)
    config.reward.function = None
    return config


@pytest.fixture(scope="module")
def straight(ranks, tmp_path_factory):
    """A run of two turns on one rank, and its rows."""
    folder = tmp_path_factory.mktemp("straight")
    return ranks(1).run(play, config=config_with("Twice", folder=folder)), rows_of(folder)


def test_the_policy_learns_its_own_tokens_alone(straight):
    result, rows = straight
    samples = Samples.from_json(result[0]["rollouts"][0])
    assert samples.observed is not None and samples.observed.any()
    assert not (samples.observed & samples.answer_mask).any() and not samples.logprobs[samples.observed].any()
    for row in range(len(samples)):
        first, length = int(samples.prompt_lengths[row]), int(samples.lengths[row])
        text = bytes(samples.tokens[row, :length].tolist()).decode(errors="replace")
        if samples.finished[row] and samples.observed[row].any():
            prompt, once, twice = text[:first], *text[first:].split("\n")[:2]
            assert twice.startswith(prompt)
            rewards = [(sum(answer.encode()) % 7) / 7 for answer in (once, twice.removeprefix(prompt))]
            assert math.isclose(float(samples.rewards[row]), sum(rewards))
    for row in rows:
        assert row["rollout_differing"] == 0 and 1 < row["turns"] <= 2
        assert math.isclose(row["ended_done"] + row["ended_max_turns"] + row["truncated"], 1)
    assert rows[0]["kl"] == 0 != rows[-1]["kl"] and rows[0]["ended_done"] > 0.5


def masked_losses(process: Process, *, config, rollouts: list[dict]) -> list[float]:
    """The losses of a plain loop over recorded samples: torch's AdamW, and GRPO over the policy's tokens, a row at a time."""
    model, adam = Decoder(policies.decoder_config(config)), config.optimizer
    model.load_state_dict(shortened(config, process=process), strict=False)  # the head is the embedding
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=adam.lr, betas=tuple(adam.betas), eps=adam.eps, weight_decay=adam.weight_decay
    )
    found = []
    for samples in map(Samples.from_json, rollouts):
        groups = samples.rewards.view(-1, 4)
        scaled = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        for rows in range(0, len(samples), 8):
            batch, advantages = samples[rows : rows + 8], scaled.flatten()[rows : rows + 8].float()
            total, tokens = torch.zeros(()), 0
            for row, advantage in enumerate(advantages):
                text = batch.tokens[row, : int(batch.lengths[row])]
                mask = batch.answer_mask[row, 1 : len(text)]
                logprobs = model(text.unsqueeze(0))[0, :-1].log_softmax(-1).gather(1, text[1:].unsqueeze(1)).squeeze(1)
                ratio = (logprobs - batch.logprobs[row, 1 : len(text)]).exp()[mask]
                total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
                tokens += int(mask.sum())
            optimizer.zero_grad()
            (total / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), adam.clip_grad_norm)
            optimizer.step()
            found.append(float(total.detach() / tokens))
    return found


def test_losses_equal_a_plain_loop_over_masked_tokens(straight, ranks, tmp_path):
    result, rows = straight
    config = config_with("Twice", folder=tmp_path)
    [expected] = ranks(1).run(masked_losses, config=config, rollouts=result[0]["rollouts"])
    assert torch.allclose(torch.tensor([row["loss"] for row in rows]), torch.tensor(expected), atol=1e-6)
    assert max(map(abs, expected)) > 1e-3


def test_a_two_turn_environment_is_learnt(ranks, tmp_path):
    config = config_with("Letters", folder=tmp_path, train__steps=20)
    config.optimizer.lr = 3e-3
    ranks(1).run(play, config=config)
    rewards = [row["reward"] for row in rows_of(tmp_path)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3


@pytest.mark.parametrize("layout", [{"zero__stage": 3}, {"zero__stage": 3, "ranks": 2}, {"ranks": 2}])
def test_samples_do_not_depend_on_stage_and_ranks(layout, straight, ranks, tmp_path):
    result, rows = straight
    found = ranks(layout.get("ranks", 1)).run(play, config=config_with("Twice", folder=tmp_path, **layout))
    first, second = samples_of(found, rollout=0), samples_of(result, rollout=0)
    assert [row["tokens"] for row in first] == [row["tokens"] for row in second]
    assert [row["reward"] for row in first] == [row["reward"] for row in second]
    if "ranks" in layout:
        for mine, theirs in zip(rows_of(tmp_path), rows, strict=True):
            assert math.isclose(mine["loss"], theirs["loss"], abs_tol=1e-5) and mine["turns"] == theirs["turns"]
    else:
        assert first == second and rows_of(tmp_path) == rows


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_a_run_resumed_between_updates_equals_the_uninterrupted_one(task, ranks, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    options = {"task": task, "ranks": 2, "zero__stage": 3, "checkpoint__every": 3}
    straight = ranks(2).run(play, config=config_with("Twice", folder=first, **options))
    options["checkpoint__resume"] = str(first / "checkpoints" / "step-000003")
    resumed = ranks(2).run(play, config=config_with("Twice", folder=second, **options))
    assert rows_of(second) == rows_of(first)[3:]
    assert resumed[0]["summary"]["loss_digest"] == straight[0]["summary"]["loss_digest"]
    assert all(row["rollout_differing"] == 0 for row in rows_of(first))


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({"rollout__engine": RolloutEngineName.generator}, None),
        (
            {"rollout__engine": RolloutEngineName.generator, **{"rollout__identity": RolloutIdentity.corrected}},
            True,
        ),
    ],
)
def test_the_inference_engine_draws_turns_and_keeps_its_cache_between_them(options, kernels, ranks, tmp_path):
    if kernels is not None:
        options |= {"rollout__correction": CorrectionName.token_truncate, "rollout__correction_max": 2.0}
    (found,) = ranks(1).run(
        play_counting, config=config_with("Endless", "rollout.max_turns=2", folder=tmp_path, **options), kernels=kernels
    )
    rows = rows_of(tmp_path)
    assert all(row["ended_done"] == 0 < row["ended_max_turns"] for row in rows)
    assert kernels is not None or all(row["rollout_differing"] == 0 for row in rows)
    assert len(found) == 4  # second turns, of two rollouts and of the evaluations before and after
    for reused, fewest in found:
        assert reused >= fewest > 0 or kernels  # which are shared when they are full, and these texts are shorter


def play_counting(process: Process, *, config, kernels: bool | None) -> list[tuple[int, int]]:
    """A run; of each second turn the reused tokens, and the tokens of its first prompts."""
    from ztk.rl.rollout import cached

    answers, found = cached._answers, []

    def counting(generator, *, prompts, sampling):
        before = generator.reused_tokens
        drawn = answers(generator, prompts=prompts, sampling=sampling)
        if (
            sampling and PROBED != sampling[0].max_tokens < config.rollout.max_tokens
        ):  # without the comparison at the start
            found.append((generator.reused_tokens - before, 6 * len(prompts)))
        return drawn

    cached._answers = counting
    try:
        play(process, config=config, kernels=kernels)
    finally:
        cached._answers = answers
    return found


def test_an_observation_that_the_template_refuses_is_named(tmp_path):
    _, turns = opened(
        tmp_path,
        template=PLAIN
        + "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}",
    )
    with pytest.raises(ValueError, match="refuses the messages: no tools") as caught:
        turns.between(ASKED, observed=OBSERVED)
    made = environments(lambda: None)
    [episode] = episodes()
    episode.rewards.append(None)
    said = str(made.refused(episode, error=caught.value))
    assert "rollout.environment=mine.py:Env: the observation of sample 0, turn 1" in said and "no tools" in said


def test_tokens_of_all_turns_are_kept(ranks, tmp_path):
    config = config_with("Twice", "rollout.top_k=5", folder=tmp_path, train__steps=2)
    (result,) = ranks(1).run(play, config=config)
    samples = Samples.from_json(result["rollouts"][0])
    assert samples.kept is not None and torch.equal(samples.kept.counts > 0, samples.answer_mask)
    assert all(row["rollout_differing"] == 0 for row in rows_of(tmp_path))


def test_functions_reward_whole_conversations_in_addition_to_steps(ranks, tmp_path):
    config = config_with("Twice", folder=tmp_path, train__steps=1)
    (tmp_path / "more.py").write_text("def lines(completions):\n    return [text.count('>') for text in completions]\n")
    config.reward.functions = [f"{tmp_path}/more.py:lines"]
    (result,) = ranks(1).run(play, config=config)
    (row,) = rows_of(tmp_path)
    assert row["rewards.lines"] > 0.5 and row["reward"] > row["rewards.lines"]


def test_a_model_of_transformers_gets_turns_by_its_chat_template(ranks, tmp_path):
    folder = tmp_path / "model"
    make("Llama", vocab_size=300, max_position_embeddings=128).save_pretrained(folder)
    save_tokenizer(train_tokenizer(), path=folder, template=PLAIN)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": ASKED[1:], "hint": "be short"}) + "\n")
    words = (
        *("model=hf", f"model.path={folder}", "rollout.task=null", "warm_start.steps=0", f"data.path={tmp_path}/chats.jsonl"),
        *("data.seq_len=110", "rollout.max_tokens=60", f"rollout.stop=[{','.join('abcdefghijklmnopqrstuvwxyz')}]"),
        *("rollout.prompts=2", "rollout.group_size=4", "train.micro_batch_size=4", "train.global_batch_size=8", "train.steps=1"),
        *("rollout.environment=tests.rl.rollout.played:Tool", "reward.functions=[tests.rl.rollout.played:roles]"),
        *("logger=disabled", "launch.device=cpu", "launch.ranks=1", "rollout.save_completions=true", "scheduler=constant"),
        "scheduler.warmup_steps=0",
    )  # fmt: skip
    config = compose("task=grpo", *words, output_dir=str(tmp_path), machine=Machine(gpus=0, cores=2))
    prepare_environment(config)
    (result,) = ranks(1).run(play, config=config)
    samples, tokenizer = Samples.from_json(result["rollouts"][0]), SubwordTokenizer.open(folder)
    rendered = "<|im_start|>tool\nfour<|im_end|>\n<|im_start|>assistant\n"
    assert samples.observed is not None and samples.observed.any()
    for tokens, observed, first in zip(samples.tokens, samples.observed, samples.prompt_lengths, strict=True):
        if observed.any():
            assert tokenizer.decode(tokens[observed], shows_special=True).removeprefix("\n") == rendered
        prompt = tokenizer.decode(tokens[: int(first)], shows_special=True)
        assert prompt.startswith("<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n2 + 2 ?<|im_end|>")
    (row,) = rows_of(tmp_path)
    assert row["rollout_outside"] == 0 and row["rewards.roles"] > 1
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    ended = [line for line in lines if line["ended"] == "done"]
    assert len(lines) == 8 and ended and all(line["turns"] == 2 and line["turn_rewards"][0] is None for line in ended)
    assert all(math.isclose(line["reward"], line["rewards.roles"] + line["turn_rewards"][1]) for line in ended)


# In a configuration


def composed(*words: str):
    return compose("task=grpo", *words, output_dir="/run", machine=Machine(gpus=0, cores=2))


def test_names_are_resolved_like_reward_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("class Env: ...")
    assert composed("rollout.environment=mine.py:Env").rollout.environment == f"{tmp_path}/mine.py:Env"
    config = composed("rollout.environment=tests.rl.rollout.played.Twice", "rollout.max_turns=3")
    assert config.rollout.environment == "tests.rl.rollout.played:Twice" and config.rollout.max_turns == 3
    assert composed().rollout.max_turns is None
    for words, said in (
        ("rollout.environment=mine", "must be FILE.py:CLASS or MODULE:CLASS; use rollout.environment=mine.py:Env"),
        ("rollout.environment=no.py:Env", "there is no file"),
        (
            "rollout.max_turns=3",
            "rollout.max_turns=3 has no effect here, only with task=grpo or task=ppo and rollout.environment",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            composed(words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError while"),
        ("def other(): ...", "has no class 'Env'"),
        ("class Env:\n    def reset(self, prompt): ...", "has no method step: write reset"),
        ("class Env:\n    def __init__(self, x): ...", "its class raised TypeError"),
        ("class Env:\n    def reset(self, prompt, solution): ...\n    def step(self, a): ...", "reset raised TypeError"),
        ("class Env:\n    def reset(self, prompt): ...\n    def step(self, a): ...", "called once before the run starts: .*step returned None"),
        ("import time\nclass Env:\n    def reset(self, prompt): time.sleep(60)\n    def step(self, a): ...", "reset did not return within"),
    ],
)  # fmt: skip
def test_an_environment_takes_a_step_before_ranks_start(text, said, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    config = composed(f"rollout.environment={tmp_path}/mine.py:Env", "reward.timeout_seconds=0.2")
    with pytest.raises(ValueError, match=said):
        prepare_environment(config)
    prepare_environment(composed("rollout.environment=tests.rl.rollout.played:Endless"))
