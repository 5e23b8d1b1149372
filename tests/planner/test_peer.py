"""Operations of other libraries in the place of ztk's: bytes that follow from shapes, as in their sources."""

import pytest

from tests.planner.test_plan import CPU
from ztk.config import ConfigError, compose
from ztk.core.policies.peers import Peer, Way
from ztk.experiments.plan import make_plan

B, T, C, HIDDEN, V, LAYERS = 2, 256, 64, 256, 4096, 2
TOKENS = B * T
WORDS = (
    *("task=plan", "hardware=h100", "precision=bf16", "data=synthetic", f"data.seq_len={T}", "launch.ranks=2"),
    *("model=nano", f"model.dim={C}", f"model.layers={LAYERS}", "model.heads=4", "model.kv_heads=2"),
    *(f"model.hidden_dim={HIDDEN}", f"model.vocab_size={V}", f"model.max_seq_len={T}", "model.tie_embeddings=false"),
    *(f"train.micro_batch_size={B}", "train.accumulation_steps=1"),
)


def planned(tmp_path, *words):
    return make_plan(compose(*WORDS, *words, output_dir=tmp_path, machine=CPU))


def peak(tmp_path, *words):
    return planned(tmp_path, *words).peak_bytes["device"]


@pytest.mark.parametrize("logits, copies", [("eager", 12), ("softmax", 8), ("compiled", 4), ("held", 8)])
def test_the_peak_has_the_copies_of_logits_that_the_peers_loss_makes(logits, copies, tmp_path):
    """copies: bytes of a logit at the same time at the most: three fp32 copies; fp32 twice; 16 bits twice; 16 bits four times."""
    small, large = (
        peak(tmp_path / name, f"plan.logits={logits}", f"train.micro_batch_size={size}", "recompute=full")
        for name, size in (("small", 8), ("large", 16))
    )
    blocks = 8 * T * 2 * C * LAYERS  # inputs of the blocks of eight more sequences
    assert large - small == pytest.approx(8 * T * V * copies + blocks, rel=0.1)


def test_half_of_the_products_are_kept(tmp_path):
    """As torchtitan keeps them: query, value, gate and down of the seven products of a block, and attention."""
    products, half = (
        planned(tmp_path / kept, "recompute=selective", f"plan.kept={kept}") for kept in ("products", "half")
    )
    recomputed = C // 2 + C + HIDDEN  # key, out, up
    fewer = products.classes[0].saved - half.classes[0].saved
    assert fewer == pytest.approx(2 * TOKENS * recomputed * LAYERS, rel=0.02)
    assert half.classes[0].flops > products.classes[0].flops


def test_ddp_holds_gradients_and_buckets(tmp_path):
    words = ("zero=stage0", "precision.reduce_dtype=fp32", "recompute=full")
    ztk, ddp = (planned(tmp_path / name, *words, f"plan.gradients={name}") for name in ("ztk", "ddp"))
    assert ddp.peak_bytes["device"] - ztk.peak_bytes["device"] >= 2 * ztk.parameters


def test_eager_operations_keep_and_move_more_than_compiled_ones(tmp_path):
    plans = {way: planned(tmp_path / way, f"plan.way={way}") for way in ("eager", "flash", "compiled")}
    saved = {way: plan.classes[0].saved for way, plan in plans.items()}
    assert saved["flash"] - saved["compiled"] == pytest.approx(
        2 * TOKENS * LAYERS * (HIDDEN - 2 * C // 2), rel=0.1
    )  # silu(gate), without repeated keys and values
    assert saved["eager"] > 1.15 * saved["compiled"]
    assert plans["eager"].time.seconds > plans["compiled"].time.seconds


def test_keys_of_a_peer_are_refused_where_they_would_do_nothing(tmp_path):
    for words, where in (
        (("plan.kept=half",), "recompute=selective"),
        (("plan.gradients=ddp", "zero=stage3"), "zero=stage0 or zero=stage1"),
    ):
        with pytest.raises(ConfigError, match=f"{words[0]} has no effect here, only with .*{where}"):
            compose(*WORDS, *words, output_dir=tmp_path, machine=CPU)
    assert Peer() == Peer(way=Way.ztk)
