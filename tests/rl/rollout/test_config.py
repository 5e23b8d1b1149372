"""Refusals of task=grpo and task=ppo at composition, each with the fix."""

import pytest

from ztk.config import ConfigError, Machine, compose

CPU = Machine(gpus=0, cores=2)


def faults(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(*overrides, output_dir="/run", machine=CPU)
    return "\n".join(caught.value.faults)


@pytest.mark.parametrize(
    ("overrides", "fixes"),
    [
        (
            # One composition for faults that have nothing to do with each other.
            (
                *("task=grpo", "topology=tp2", "zero.quantized_weights=true", "precision=fp8", "model.vocab_size=300", "launch.elastic=true"),
                *("checkpoint=periodic", "checkpoint.asynchronous=true", "train.log_every=3", "rollout.max_tokens=5"),
                *("rollout.prompts=3", "rollout.group_size=1", "rollout.weights=streamed", "critic.lr=0.1", "kl.place=reward"),
                *("critic.zero=stage3", "reward.offload=cpu"),
                *("advantage.gamma=0.9", "policy.form=cispo", "policy.dual_clip=3", "rollout.correction_max=3"),
                *("rollout.temperature=0", "advantage.baseline=mean", "rollout.engine=generator", "rollout.identity=exact"),
            ),
            (
                "topology.tensor=2: rollout.engine=generator draws with a rank's own weights",
                "use rollout.identity=corrected or off, or zero.quantized_weights=false",
                "use rollout.identity=corrected or off, or precision=bf16",
                "use model.vocab_size=256",
                "use launch.elastic=false",
                "use checkpoint.asynchronous=false",
                "use train.log_every=1",
                "use rollout.max_tokens=6",
                "use rollout.prompts=128",
                "use rollout.group_size=8, or advantage.baseline=critic",
                "rollout.weights=streamed has no effect here, only with task=grpo or task=ppo and zero=stage3",
                "critic.lr=0.1 has no effect here, only with task=ppo",
                "critic.zero=stage3 has no effect here, only with task=ppo",
                "reward.offload=cpu has no effect here, only with task=grpo or task=ppo and reward.path",
                "advantage.gamma=0.9 has no effect here",
                "policy.dual_clip=3.0 has no effect here, only with task=grpo or task=ppo and policy.form=clipped",
                "rollout.correction_max=3.0 has no effect here",
                "kl.place=reward has no effect here, only with task=grpo or task=ppo and kl.coef above 0",
                "rollout.temperature=0.0: must be above 0",
            ),
        ),
        (
            (
                *("task=grpo", "data=stdlib", "zero=ddp", "model=tiny_moe", "advantage.baseline=critic", "rollout.identity=exact"),
                *("kl.coef=0.1", "kl.estimator=k1", "kl.reference=none", "kl.stop_above=3", "train.global_batch_size=100"),
            ),
            (
                "use data=prompts",
                "use zero=stage0 to stage3",
                "use rollout.identity=corrected or off, or model=tiny",
                "use task=ppo, or advantage.baseline=mean",
                "use kl.estimator=k3_weighted, or kl.place=reward",
                "use kl.reference=frozen, or kl.coef=0",
                "kl.stop_above=3 needs a reference",
                "use train.global_batch_size=128",
            ),
        ),
        (
            (
                *("task=ppo", "advantage.baseline=mean", "rollout.task=null", "kl.estimator=k3_weighted", "data.seq_len=10"),
                *("rollout.weights=whole", "warm_start.batch_size=63"),
            ),
            (
                "use task=grpo, or advantage.baseline=critic",
                "use rollout.task=sorting, or data.path=FILE.jsonl with reward.function",
                "use reward.function=mine.py:score",
                "use warm_start.steps=0",
                "use warm_start.batch_size=64",
                "use kl.estimator=k1, or kl.place=loss",
            ),
        ),
        (("task=ppo", "advantage.scale=group", "data.seq_len=10"), ("use advantage.scale=batch", "use data.seq_len=14")),
        (("algorithm=ppo", "task=grpo", "reward.function=mine.score"), ("use task=ppo", "use reward.function=mine.py:score")),
        (("task=grpo", "reward.function=no/mine.py:score"), ("there is no file no/mine.py",)),
        (("algorithm=dapo",), ("algorithm=dapo has no effect with task=pretrain: use task=grpo or task=ppo",)),
        (("data=prompts",), ("use data=stdlib, or task=grpo",)),
        (
            ("task=grpo", "topology=pp2", "topology.schedule=interleaved", "train.accumulation_steps=2"),
            ("each of warm_start.steps=", "use topology.schedule=1f1b, or warm_start.path=RUN"),
        ),
        (("rollout.prompts=3", "kl.coef=0.1"), ("rollout.prompts=3 has no effect here", "kl.coef=0.1 has no effect here")),
        (
            ("task=ppo", "rollout.drop_equal_groups=true", "rollout.group_size=1", "rollout.prompts=128"),
            ("use rollout.drop_equal_groups=false, or rollout.group_size=8",),
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_fix(overrides, fixes):
    told = faults(*overrides)
    missing = [fix for fix in fixes if fix not in told]
    assert not missing, told


def test_an_algorithm_sets_its_keys_and_the_command_line_has_the_last_word():
    words = ("algorithm=dapo", "policy.clip_low=0.1", "data.validation_fraction=0")  # the last holds nothing out
    config = compose("task=grpo", *words, output_dir="/run", machine=CPU)
    assert (config.policy.clip_low, config.policy.clip_high, config.rollout.drop_equal_groups) == (0.1, 0.28, True)
    assert config.kl.estimator is None and config.rollout.weights is None  # without effect here
    assert config.train.accumulation_steps == 2 and config.precision.dtype == "fp32"


def test_layouts_that_a_reward_model_does_not_have(tmp_path):
    cut = ("task=grpo", "topology.tensor=2", "model.kv_heads=2", f"reward.path={tmp_path}")
    said = faults(*cut, "topology.sequence_parallel=true")
    assert "the value layer of the model of reward.path has one output" in said
    (tmp_path / "config.json").write_text("{}")
    assert "from transformers and has neither stages nor parts" in faults(*cut, "topology.pipeline=2")


def test_a_smaller_step_has_both_ways_in_its_fault():
    words = ("task=grpo", "rollout.prompts=2", "rollout.group_size=2")
    assert "use rollout.prompts=64, or a train.global_batch_size that divides 4" in faults(*words)
    found = faults(*words, "train.global_batch_size=4")
    assert "use train.global_batch_size=64, or train.micro_batch_size=2" in found
