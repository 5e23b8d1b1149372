"""Packed documents in models of transformers: the logits of each document alone, or a refusal."""

import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.hf.test_causal import Strategy
from tests.parallel.topology.families import VOCABULARY, make
from ztk.core.runtime import Process, Topology
from ztk.experiments.packing import can_pack_all
from ztk.hf import attention_interface
from ztk.hf.causal import CausalForward, open_causal
from ztk.hf.documents import TESTED, documents_fault, known_documents
from ztk.hf.kernels import inject_kernels
from ztk.hf.scoring import ScoringForward
from ztk.hf.sequences import divisible
from ztk.kernels import attention_varlen
from ztk.nn import Documents
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import MicroBatch, PipelinePolicy
from ztk.rl.rollout import answer_logits, lay_out

FAMILIES = {
    make_name.lower(): make_name
    for make_name in ("GPT2", "Phi", "Phi3", "Gemma", "Gemma2", "Llama", "Mistral", "Qwen2", "Qwen3")
}
FAMILIES |= {"olmo2": "Olmo2", "gpt_neox": "GPTNeoX", "stablelm": "StableLm", "mixtral": "Mixtral"}
FAMILIES |= {"qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}
SIZES = (5, 1, 6, 4, 8)  # of documents, two sequences of 12
# fp32 sums over masked rows in another order than over short ones: a few units of 6e-8 of logits of size 1.
ABSOLUTE = 1e-5


def packed() -> tuple[torch.Tensor, Documents]:
    positions = torch.cat([torch.arange(size) for size in SIZES]).view(2, 12)
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(4))
    return tokens, Documents.at(positions)


def test_every_tested_family_is_tested():
    assert set(FAMILIES) == set(TESTED)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("kind", TESTED)
def test_logits_equal_separate_documents(kind, by_kernel):
    plain, model = make(FAMILIES[kind]).eval(), make(FAMILIES[kind]).eval()
    if by_kernel:
        attention_interface.use_attention(model)
    tokens, documents = packed()
    with torch.no_grad():
        found = CausalForward(model)(tokens, None, documents).flatten(0, 1).split(SIZES)
        for row, logits in zip(tokens.flatten().split(SIZES), found, strict=True):
            torch.testing.assert_close(logits, plain(input_ids=row[None]).logits[0], rtol=0, atol=ABSOLUTE)


@pytest.mark.parametrize("kind", ["sdpa", "eager", "ztk"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_packed_texts_have_the_losses_of_padded_rows(family, kind):
    """Loss and gradients of SFT, the log-probabilities of GRPO, and the values of a critic."""
    lengths, length = torch.tensor([9, 3, 12, 1, 7]), 12
    tokens = torch.randint(3, VOCABULARY, (5, length), generator=torch.Generator().manual_seed(5))
    counts = (torch.arange(length) < lengths[:, None]) & (torch.arange(length) > 1)
    found = []
    for packs in (False, True):
        model = make(family).eval()
        model.set_attn_implementation("eager" if kind == "eager" else "sdpa")
        if kind == "ztk":
            attention_interface.use_attention(model)
        forward = CausalForward(model)
        layout = lay_out(tokens, lengths=lengths, packs=packs, device=torch.device("cpu"), module=model)
        assert layout.tokens.numel() == (int(lengths.sum()) if packs else tokens.numel())
        given = () if layout.documents is None else (layout.documents,)
        loss = forward(layout.tokens, layout.targets(counts), *given)
        loss.backward()
        logprobs = answer_logits(forward, layout=layout, mask=counts).log_softmax(-1)
        model.score = torch.nn.Linear(32, 1, bias=False)
        torch.nn.init.ones_(model.score.weight)
        values = layout.forward(ScoringForward(model)).flatten()[layout.at(lengths - 1)]
        found.append(
            [
                loss.detach(),
                logprobs.detach(),
                values.detach(),
                *(p.grad for p in model.parameters() if p.grad is not None),
            ]
        )
    for padded, own in zip(*found, strict=True):
        torch.testing.assert_close(own, padded, rtol=0, atol=ABSOLUTE * max(1.0, float(padded.abs().max())))


@pytest.mark.parametrize("kind", TESTED)
def test_the_attention_of_parts_keeps_documents_apart(kind):
    """Every family hands the documents on to its attention layers, which get no mask then."""
    plain, model = make(FAMILIES[kind]).eval(), make(FAMILIES[kind]).eval()
    divisible(model)
    model.part_attention.positions = slice(0, 12)  # all of the sequence
    tokens, documents = packed()
    if documents_fault(model.config, in_parts=True) is not None:
        with pytest.raises(ValueError, match=r"by a mask over full sequences; use data\.packing=concatenate"):
            CausalForward(model)(tokens, None, documents)
        return
    with torch.no_grad():
        found = CausalForward(model)(tokens, None, documents).flatten(0, 1).split(SIZES)
        for row, logits in zip(tokens.flatten().split(SIZES), found, strict=True):
            torch.testing.assert_close(logits, plain(input_ids=row[None]).logits[0], rtol=0, atol=ABSOLUTE)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("GPT2", {}),
        ("Mistral", {"sliding_window": 3}),
        ("Qwen2Moe", {}),
        # Its layers keep the window to themselves.
        ("Qwen2Moe", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 2}),
    ],
    ids=["Llama", "GPT2", "Mistral with a window", "Qwen2Moe", "Qwen2Moe with a window"],
)
def test_with_kernels(family, changes):
    """Attention is the op `attention_varlen`; gradients, too."""
    tokens, documents = packed()
    found = []
    for kernels in (False, True):
        model = make(family, **changes)
        if kernels:
            inject_kernels(model)
        with mock.patch.object(attention_interface, "attention_varlen", wraps=attention_varlen) as op:
            loss = CausalForward(model)(tokens, tokens.roll(-1, 1), documents)
        assert op.call_count == (2 if kernels else 0)  # one per layer
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for plain, kernel in zip(*found, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=0, atol=ABSOLUTE * max(1.0, float(plain.abs().max())))


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 3}])
def test_documents_are_kept_apart_where_the_kernel_cannot_compute(changes, monkeypatch):
    """With dropout, for example. No mask comes from transformers then."""
    tokens, documents = packed()
    model = make("Mistral", **changes).eval()
    attention_interface.use_attention(model)
    with torch.no_grad():
        expected = CausalForward(model)(tokens, None, documents)
        monkeypatch.setattr(attention_interface, "_fits", lambda *given, **named: False)
        torch.testing.assert_close(CausalForward(model)(tokens, None, documents), expected, rtol=0, atol=ABSOLUTE)


@pytest.mark.parametrize("family", ["Bloom", "OPT"])
def test_another_family_is_refused(family, tmp_path, caplog):
    tokens, documents = packed()
    make(family).save_pretrained(tmp_path)
    engine = SimpleNamespace(
        module=open_causal(str(tmp_path), init="random", seed=1)[0], process=SimpleNamespace(rank=0)
    )
    assert not can_pack_all(engine) and f"texts are padded: {family}ForCausalLM is not known" in caplog.text
    with pytest.raises(
        ValueError, match=r"models of type \w+ are not known to keep documents apart.*data\.packing=concatenate"
    ):
        CausalForward(make(family))(tokens, None, documents)


def loss_of(process: Process, *, folder: str, strategy: Strategy) -> float:
    model, values = open_causal(folder, init=strategy.init, seed=1)
    engine = parallelize(
        model,
        process=process.arrange(strategy.topology),
        optimizer=OptimizerPolicy(name="adamw", lr=1e-3),
        pipeline=PipelinePolicy(schedule=strategy.schedule),
        accumulation_steps=2,
        initial_values=values,
    )
    tokens, documents = packed()
    batches = [MicroBatch(args=(tokens, tokens.roll(-1, 1), documents))] * 2
    engine.train_batch(batches)
    loss = float(engine.train_batch(batches))
    engine.close()
    return loss


def test_stages_equal_one_rank(ranks, tmp_path):
    folder = str(tmp_path / "GPT2")
    make("GPT2").save_pretrained(folder)
    [alone] = ranks(1).run(loss_of, folder=folder, strategy=Strategy())
    for loss in ranks(2).run(loss_of, folder=folder, strategy=Strategy(topology=Topology(pipeline=2))):
        assert loss == pytest.approx(alone, rel=1e-5)


def test_other_threads_look_for_documents_while_a_forward_has_none():
    from transformers import masking_utils  # here: ranks import this file

    positions = torch.tensor([[0, 1, 2, 0, 1]])
    entered, left, found = threading.Event(), threading.Event(), []

    def another() -> None:
        found.append(masking_utils.find_packed_sequence_indices(positions))
        with known_documents(None):
            entered.set()
            left.wait(10)
            found.append(masking_utils.find_packed_sequence_indices(positions))
        found.append(masking_utils.find_packed_sequence_indices(positions))

    with known_documents(None):
        thread = threading.Thread(target=another)
        thread.start()
        entered.wait(10)
    left.set()
    thread.join()
    found.append(masking_utils.find_packed_sequence_indices(positions))
    assert [value if value is None else value.tolist() for value in found] == [
        [[0, 0, 0, 1, 1]],
        None,
        [[0, 0, 0, 1, 1]],
        [[0, 0, 0, 1, 1]],
    ]
