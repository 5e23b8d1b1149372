"""KTO, SimPO and ORPO: losses by hand, divided steps, and refused options."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.experiments.test_alignment import config_of, losses_of, play
from tests.rl.align.test_losses import of_pair
from ztk.config import ConfigError, Machine, compose
from ztk.data import Share
from ztk.experiments.examples import Examples, ExampleStream, lengths_of
from ztk.rl.align import DpoPolicy, PairLogprobs, dpo_loss, dpo_losses, kto_losses


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("kl", [0.5, -0.5])
def test_kto_by_hand(kl):
    """A negative divergence counts as 0."""
    policy = DpoPolicy(loss="kto", beta=0.2, desirable_weight=2.0, undesirable_weight=0.5)
    ratios, labels = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([True, False])
    found = kto_losses(ratios, labels=labels, kl=torch.tensor(kl), policy=policy)
    known = max(kl, 0.0)
    expected = [2.0 * (1 - sigmoid(0.2 * (1.0 - known))), 0.5 * (1 - sigmoid(0.2 * (known + 1.0)))]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_simpo_and_orpo_by_hand():
    """Means per token: chosen -1 / 2, rejected -4 / 4."""
    pairs = of_pair(-1.0, -4.0)
    simpo = dpo_losses(
        pairs, policy=DpoPolicy(loss="simpo", beta=2.0, margin=0.25, label_smoothing=0.1), reference=None
    )
    x = 2.0 * 0.5 - 0.25
    expected = -0.9 * math.log(sigmoid(x)) - 0.1 * math.log(sigmoid(-x))
    assert simpo.losses.item() == pytest.approx(expected, rel=1e-12)
    odds = [p / (1 - p) for p in (math.exp(-0.5), math.exp(-1.0))]
    policy = DpoPolicy(loss="orpo", beta=0.3, sft_weight=1.0)
    orpo = dpo_losses(pairs, policy=policy, reference=None)
    assert orpo.losses.item() == pytest.approx(-0.3 * math.log(sigmoid(math.log(odds[0] / odds[1]))), rel=1e-12)
    with pytest.raises(AssertionError):
        dpo_loss(orpo, pairs=pairs, policy=policy, num_pairs=1, num_tokens=3)  # whole texts are learnt
    with pytest.raises(ValueError, match="must be 0 or more"):
        DpoPolicy(loss="kto", desirable_weight=-1.0)
    with pytest.raises(ValueError, match="use kto_losses"):
        dpo_losses(pairs, policy=DpoPolicy(loss="kto"), reference=None)
    with pytest.raises(ValueError, match="dpo.loss=sigmoid: single answers have another loss"):
        kto_losses(torch.zeros(1), labels=torch.ones(1, dtype=torch.bool), kl=torch.zeros(()), policy=DpoPolicy())


@pytest.mark.parametrize("loss", ["kto", "orpo", "simpo"])
def test_losses_do_not_depend_on_the_division_of_a_step(loss, ranks, tmp_path):
    """Of one rank with one micro-batch, and of two ranks with two each."""
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    words = (f"dpo.loss={loss}", "warm_start.steps=0", "train.eval_every=0")
    ranks(1).run(play, configs=[config_of("dpo", *words, "train.micro_batch_size=8", folder=whole, ranks=1)])
    ranks(2).run(play, configs=[config_of("dpo", *words, "train.micro_batch_size=2", folder=divided)])
    assert losses_of(whole) == pytest.approx(losses_of(divided), rel=1e-5)
    rows = [json.loads(line) for line in (divided / "metrics.jsonl").read_text().splitlines()]
    if loss == "kto":
        assert all(row["desirable"] == 0.5 and math.isfinite(row["kl"]) for row in rows)


def test_orpo_of_a_certain_answer_is_finite():
    chosen = torch.zeros(1, requires_grad=True)
    rejected = torch.full((1,), -2.0, requires_grad=True)
    pairs = PairLogprobs(chosen=chosen, rejected=rejected, chosen_tokens=torch.ones(1), rejected_tokens=torch.ones(1))
    dpo_losses(pairs, policy=DpoPolicy(loss="orpo"), reference=None).losses.sum().backward()
    assert chosen.grad.isfinite() and rejected.grad.isfinite()


def test_other_labels_are_other_records(tmp_path):
    def digest(label: bool) -> str:
        (tmp_path / "kto.jsonl").write_text(
            f'{{"prompt": "a=", "completion": "b", "label": {str(label).lower()}}}\n' * 2
        )
        words = ("task=dpo", "dpo.loss=kto", "warm_start.steps=0", "data.validation_fraction=0", "train.eval_every=0")
        machine = Machine(gpus=0, cores=2)
        config = compose(*words, f"data.path={tmp_path}/kto.jsonl", output_dir=str(tmp_path), machine=machine)
        process: Any = SimpleNamespace(rank=0, comm=SimpleNamespace(gather_objects=lambda value: [value]))
        return Examples(config, process=process).digest

    assert digest(True) != digest(False)


def test_kto_reads_labels_and_takes_pairs_apart(tmp_path):
    records = [{"prompt": "a=", "completion": letter, "label": letter < "c"} for letter in "abcd"]
    (tmp_path / "kto.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a=", "chosen": "x", "rejected": "y"}\n' * 2)
    common = (
        "task=dpo",
        "dpo.loss=kto",
        "warm_start.steps=0",
        "data.validation_fraction=0",
        "train.global_batch_size=4",
    )

    def step_of(name: str):
        words = (*common, "train.micro_batch_size=4", f"data.path={tmp_path}/{name}.jsonl", "train.eval_every=0")
        config = compose(*words, output_dir=str(tmp_path), machine=Machine(gpus=0, cores=2))
        share = Share.of_total(4, micro_batch=4, rank=0, world_size=1)
        process: Any = SimpleNamespace(rank=0, comm=SimpleNamespace(gather_objects=lambda value: [value]))
        return ExampleStream(Examples(config, process=process), config=config, share=share).next_step()

    for name in ("kto", "pairs"):
        step = step_of(name)
        (batch,), (other,) = step.micro_batches, step.mismatched.micro_batches
        assert sorted(batch.labels.tolist()) == [False, False, True, True]
        texts = [
            bytes(part.tolist()).decode() for part in batch.sequences.tokens.split(batch.sequences.lengths.tolist())
        ]
        moved = [
            bytes(part.tolist()).decode() for part in other.sequences.tokens.split(other.sequences.lengths.tolist())
        ]
        assert moved == [texts[number - 1] for number in range(4)]  # all prompts are equal


def test_no_length_cuts_a_mismatched_pair(tmp_path):
    records = [
        {"prompt": "a" * 20, "completion": "b", "label": True},
        {"prompt": "a", "completion": "b" * 20, "label": 0},
    ]
    (tmp_path / "kto.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    words = ("task=dpo", "dpo.loss=kto", "warm_start.steps=0", f"data.path={tmp_path}/kto.jsonl", "train.eval_every=0")
    options: dict[str, Any] = {"output_dir": str(tmp_path), "machine": Machine(gpus=0, cores=2)}
    words = (*words, "data.validation_fraction=0")
    assert compose(*words, **options).data.seq_len == 48  # 20 and 21 tokens, in rows of 8
    with pytest.raises(ConfigError, match="data.seq_len=32: dpo.loss=kto .* 20 and 21 tokens; use data.seq_len=41"):
        compose(*words, "data.seq_len=32", **options)
    with pytest.raises(ConfigError, match="model.max_seq_len=32: dpo.loss=kto .* 20 and 21 tokens; use"):
        compose(*words, "model.max_seq_len=32", **options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("dpo.loss=kto", "dpo.reference=precomputed"), "use dpo.reference=frozen or lora_off"),
        (("dpo.loss=orpo", "dpo.reference=precomputed"), "use dpo.reference=none or frozen"),
        (("dpo.loss=kto", "train.global_batch_size=1", "train.micro_batch_size=1"), "use train.global_batch_size=2"),
        (("dpo.loss=kto", "dpo.sft_weight=1"), "dpo.sft_weight=1.0 has no effect here"),
        (("dpo.loss=orpo", "dpo.label_smoothing=0.1"), "dpo.label_smoothing=0.1 has no effect here"),
        (("dpo.margin=1",), "dpo.margin=1.0 has no effect here"),
        (("dpo.desirable_weight=2",), "dpo.desirable_weight=2.0 has no effect here"),
    ],
)
def test_keys_of_other_losses_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        compose("task=dpo", *words, output_dir="/run", machine=Machine(gpus=0, cores=2))


def test_losses_without_a_reference_keep_none_unless_it_is_asked_for():
    def reference(*words: str) -> str:
        return compose("task=dpo", *words, output_dir="/run", machine=Machine(gpus=0, cores=2)).dpo.reference

    assert reference("dpo.loss=orpo") == "none" and reference("dpo.loss=kto") == reference() == "frozen"
    assert reference("dpo.loss=simpo", "dpo.reference=frozen") == "frozen"


def test_fine_tuning_leaves_rejected_answers_out_with_a_count(tmp_path):
    records = [{"prompt": "a=", "completion": letter, "label": letter < "c"} for letter in "abcde"]
    (tmp_path / "kto.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    words = ("task=sft", f"data.path={tmp_path}/kto.jsonl", "data.validation_fraction=0", "train.eval_every=0")
    machine = Machine(gpus=0, cores=2)
    config = compose(*words, output_dir=str(tmp_path), machine=machine)
    process: Any = SimpleNamespace(rank=0, comm=SimpleNamespace(gather_objects=lambda value: [value]))
    examples = Examples(config, process=process)
    assert {bytes(example.texts[0].tokens.tolist()) for example in examples.records} == {b"a=a\n", b"a=b\n"}
    assert lengths_of(examples, step=1).endswith("\n3 records with label false are left out")
    assert "step of train.global_batch_size=8 repeats the 2 records" in lengths_of(examples, step=8)
    (tmp_path / "kto.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records[2:]))
    with pytest.raises(ConfigError, match="all 3 records have label false, so there is no answer to learn"):
        compose(*words, output_dir=str(tmp_path), machine=machine)
    (tmp_path / "kto.jsonl").write_text('{"prompt": "a=", "answer": "b", "label": 0}\n')
    with pytest.raises(ConfigError, match='line 1: "label": 0 may belong to a record of KTO'):
        compose(*words, output_dir=str(tmp_path), machine=machine)
