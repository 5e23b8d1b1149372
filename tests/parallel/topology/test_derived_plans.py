"""Tensor-parallel plans that follow from the module tree: every family of decoders trains as on one rank, and plans of transformers agree."""

import pytest
import torch

from tests.parallel.topology.families import FAMILIES, LENGTH, VOCABULARY, make
from ztk.checkpoint import full_state_dict
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Process, Topology
from ztk.core.runtime.seed import generator
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.tensor import Style, plan_of
from ztk.parallel.tensor.derived import derived_rules

RELATIVE = 1e-5  # another order of summation; see test_layouts.py
ROUNDING = 2.0**-23  # of a weight, from which a gradient is subtracted
# GPT-2's, GPT-BigCode's and BLOOM's: no plan of their own. Phi-3's, Olmo-2's plans gather as the derivation does.
OWN_PLAN = (
    "GPTNeoX",
    "Phi",
    "Phi3",
    "Gemma",
    "Gemma2",
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Olmo2",
    "Cohere",
    "Starcoder2",
)
OWN_PLAN += ("Qwen2Moe", "Qwen3Moe", "Mixtral")


def words(step: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator("words", step))


def compare(process: Process, *, family: str, stage: int, **changes) -> tuple[float, float, set[str]]:
    """The largest relative differences from plain torch, beyond rounding, of a loss and of a parameter's gradient; the sharded parameters."""
    plain = make(family, **changes)
    first = {name: value.clone() for name, value in plain.state_dict().items()}
    engine = parallelize(
        without_plan(make(family, **changes)),
        process=process.arrange(Topology(tensor=process.world_size)),
        optimizer=OptimizerPolicy(name="sgd", lr=1.0, momentum=0.0, clip_grad_norm=0.0),
        zero=ZeroPolicy(stage=stage),
    )
    tokens = words(0)
    expected = plain(input_ids=tokens, labels=tokens).loss
    expected.backward()
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    off_loss = abs(float(loss.detach()) / float(expected.detach()) - 1)
    state, off_gradient = full_state_dict(engine, everywhere=True), 0.0
    for name, parameter in plain.named_parameters():
        gradient = first[name] - state[name].float()  # of a step of SGD with a learning rate of 1
        size = float(parameter.grad.abs().max())
        allowed = 2 * ROUNDING * float(first[name].abs().max())
        off_gradient = max(off_gradient, (float((gradient - parameter.grad).abs().max()) - allowed) / max(size, 1e-3))
    cut = {name for name, part in engine.zero.parts.items() if not part.is_full}
    engine.close()
    return off_loss, off_gradient, cut


def without_plan(model: torch.nn.Module) -> torch.nn.Module:
    """Without the plan that transformers brings: the derivation alone is under test."""
    model._tp_plan = {}
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_equal_one_rank(ranks, family):
    for loss, gradient, cut in ranks(2).run(compare, family=family, stage=3 if family in ("GPT2", "OPT") else 0):
        assert loss < RELATIVE
        assert gradient < RELATIVE
        assert len(cut) >= 2 * 2  # both layers: at least attention's weights


@pytest.mark.parametrize("family", OWN_PLAN)
def test_a_plan_of_the_model_agrees(family):
    """Both plans have the same styles for common modules; the model's own plan also shards embeddings."""
    with torch.device("meta"):
        model = make(family)
    derived = derived_rules(model)
    own = plan_of(model).matches(model)
    assert own
    for name, rule in own.items():
        if name in derived:
            assert derived[name].style is rule.style, name
            assert rule.style is not Style.column or derived[name].grain == rule.grain, name
        else:
            assert rule.style is Style.vocabulary, name


def refused(process: Process, *, changes: dict) -> str:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {
        "vocab_size": 64,
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
    }
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes | changes))
    try:
        parallelize(model, process=process.arrange(Topology(tensor=2)), optimizer=OptimizerPolicy())
    except ValueError as error:
        return str(error)
    return ""


def test_heads_that_do_not_divide_are_refused_with_dropout(ranks):
    for text in ranks(2).run(refused, changes={"attention_dropout": 0.1}):
        assert "topology.tensor=2 does not divide gpt_neox.layers.0.attention.query_key_value" in text
        assert "(attention_dropout)" in text
    assert ranks(2).run(refused, changes={}) == ["", ""]
