"""Losses without pairs, without a reference, and of a teacher, next to TRL's trainers: one model, the same texts, fp32, one process."""

import copy
import functools
import json

import pytest

pytest.importorskip("trl")

import datasets
import torch
import torch.nn.functional as F
import transformers

from tests.rl.align import trl_runs
from tests.rl.align.chats import PLAIN, save_tokenizer, train_tokenizer
from ztk.config import Machine, compose
from ztk.core.runtime import Process
from ztk.experiments import dpo, rollouts
from ztk.report import plot

CASES = (
    "simpo",
    "simpo and sft",
    "orpo",
    "kto",
    "distill",
    "distill, forward",
    "distill, reverse",
    "distill, own draws",
)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_trls_at_every_step(case, tmp_path, monkeypatch):
    """Sums of fp32 in another order; see `tests/slow/test_trl.py`, which has the other losses, too."""
    monkeypatch.setattr(plot, "plot_run", lambda folder: None)
    monkeypatch.setattr(rollouts, "HELD_OUT_PROMPTS", 1)
    overrides, options = trl_runs.CASES[case]
    words = (*trl_runs.with_teacher(overrides, folder=str(tmp_path)), *trl_runs.COMMON, "train.steps=4")
    config = compose(*words, output_dir=str(tmp_path), machine=Machine(gpus=0, cores=2))
    ours, theirs = trl_runs.run_both(config, process=Process.start(device="cpu"), folder=str(tmp_path), options=options)
    assert ours.losses == pytest.approx(theirs.losses, abs=trl_runs.TOLERANCE) and len(set(ours.losses)) == 4


def test_mismatched_pairs_of_kto_keep_all_tokens(tmp_path, monkeypatch):
    """Long prompts have short answers, so that a prompt with the answer to another one is longer than any record."""
    monkeypatch.setattr(plot, "plot_run", lambda folder: None)
    monkeypatch.setattr(rollouts, "HELD_OUT_PROMPTS", 1)
    sizes = [(30, 2), (3, 28), (12, 5), (4, 31)]
    records = [
        {"prompt": "a" * (prompt + number % 3) + "=", "completion": letter * answer, "label": number % 4 > 0}
        for number, letter in enumerate("bcdefghijklmnopq")
        for prompt, answer in [sizes[number % 4]]
    ]
    (tmp_path / "kto.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    words = (f"data.path={tmp_path}/kto.jsonl", "data.validation_fraction=0", "train.steps=4", "dpo.beta=0.5")
    config = compose(
        *(*trl_runs.DPO[:-1], "dpo.loss=kto", *trl_runs.COMMON, *words, "optimizer.lr=1e-2"),
        output_dir=str(tmp_path / "run"),
        machine=Machine(gpus=0, cores=2),
    )
    assert config.data.seq_len == 72  # 33 tokens of the longest prompt and 32 of the longest answer
    ours, theirs = trl_runs.run_both(
        config, process=Process.start(device="cpu"), folder=str(tmp_path / "run"), options={}
    )
    assert ours.losses == pytest.approx(theirs.losses, abs=trl_runs.TOLERANCE) and len(set(ours.losses)) == 4


CHATS = [
    {
        "prompt": [{"role": "user", "content": f"2 + {number} ?"}],
        "chosen": [{"role": "assistant", "content": f"it is {number + 2}"}],
        "rejected": [{"role": "assistant", "content": "6" * (1 + number % 3)}],
    }
    for number in range(6)
]
OF_CHATS = {"dpo": ("dpo.loss=sigmoid", "dpo.sft_weight=0.5"), "orpo": ("dpo.loss=orpo",), "simpo": ("dpo.loss=simpo",)}


def loss_by_hand(model: torch.nn.Module, *, tokenizer, loss: str, extra: list[int]) -> float:
    """The loss of CHATS by plain transformers over its own template's tokens. extra: tokens after each answer, which are learnt."""
    terms, whole, answers = [], [], []
    for chat in CHATS:
        means = []
        for kind in ("chosen", "rejected"):
            start = len(tokenizer.apply_chat_template(chat["prompt"], add_generation_prompt=True, return_dict=False))
            ids = tokenizer.apply_chat_template(chat["prompt"] + chat[kind], return_dict=False) + extra
            tokens = torch.tensor(ids)
            found = model(tokens[None]).logits[0].double().log_softmax(1)[:-1].gather(1, tokens[1:, None])[:, 0]
            means.append(found[start - 1 :].mean())
            if kind == "chosen":
                whole.append(found)
                answers.append(found[start - 1 :])
        chosen, rejected = means
        odds = chosen - rejected - ((-chosen.exp()).log1p() - (-rejected.exp()).log1p())
        margin = {"dpo": torch.zeros(()), "orpo": odds, "simpo": 0.1 * (chosen - rejected) - 0.5}[loss]
        terms.append(-F.logsigmoid(margin) * (0.1 if loss == "orpo" else 1))
    learnt = torch.cat(whole if loss == "orpo" else answers)
    return (torch.stack(terms).mean() - learnt.mean() * (0.5 if loss == "dpo" else 1)).item()


@pytest.mark.parametrize("loss", OF_CHATS)
def test_answers_of_chats_end_once(loss, tmp_path, monkeypatch):
    """The first loss is the formula's over the template's tokens, and DPOTrainer's. Where a template writes a line feed after the end token,
    ORPOTrainer and CPOTrainer add a second end token: their loss is the formula's over one token more.
    """
    monkeypatch.setattr(plot, "plot_run", lambda folder: None)
    monkeypatch.setattr(rollouts, "HELD_OUT_PROMPTS", 1)
    tokenizer = train_tokenizer()
    tokenizer.pad_token = "<|im_start|>"
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    special = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **special, initializer_range=0.3))
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tokenizer, path=tmp_path / "model", template=PLAIN)
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in CHATS))
    config = compose(
        *("task=dpo", *OF_CHATS[loss], "model=hf", f"model.path={tmp_path}/model", f"data.path={tmp_path}/pairs.jsonl"),
        *("data=preferences", "data.validation_fraction=0", "warm_start.steps=0", "train.global_batch_size=6"),
        *("train.micro_batch_size=6", "train.steps=1", "train.eval_every=0", "launch.ranks=1", "launch.device=cpu"),
        "logger=disabled",
        output_dir=str(tmp_path),
        machine=Machine(gpus=0, cores=2),
    )
    dpo.run(config, process=Process.start(device="cpu"))
    (ours,) = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kind, settings = trl_runs.trainer_of(config)
    options = {"dpo": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, "simpo": {"loss_type": "simpo"}}
    theirs = []

    class Recording(kind):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            theirs.append((found[0] if isinstance(found, tuple) else found).item())
            return found

    arguments = settings(
        output_dir=str(tmp_path / "trl"),
        max_steps=1,
        per_device_train_batch_size=6,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options.get(loss, {}),
    )
    reference = {"ref_model": copy.deepcopy(model)} if loss == "dpo" else {}
    expected = functools.partial(loss_by_hand, copy.deepcopy(model), tokenizer=tokenizer, loss=loss)
    data = datasets.Dataset.from_list(CHATS)
    Recording(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, **reference).train()
    once, twice = expected(extra=[]), expected(extra=[tokenizer.eos_token_id])
    assert ours == pytest.approx(once, abs=trl_runs.TOLERANCE) and abs(once - twice) > 1e-2
    assert theirs == [pytest.approx(once if loss == "dpo" else twice, abs=trl_runs.TOLERANCE)]
