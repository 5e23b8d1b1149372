"""Runs of `task=grpo` and `task=ppo` over models that several ranks share."""

import pytest
import torch

from tests.parallel.topology.families import make
from tests.rl.rollout.runs import config_of, play, rows_of
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.models import warm_start
from ztk.hf.causal import CausalForward
from ztk.inference import Generator
from ztk.nn import Decoder, DecoderConfig
from ztk.nn import loss as losses
from ztk.nn.moe import Router
from ztk.rl.rollout import Routers, Samples, answer_logits, lay_out, same_experts
from ztk.rl.rollout.routing import experts_of

DIVIDED = ("tp2", "pp2", "sp2")
SHORT = ("model.kv_heads=2", "warm_start.steps=10", "train.steps=3")  # the last step is the first of a second rollout


def losses_of(task: str, topology: str, *more: str, ranks, folder, count: int) -> list[float]:
    config = config_of(task, *SHORT, *more, f"topology={topology}", folder=folder / topology, ranks=count)
    found = ranks(count).run(play, config=config)
    assert all(rank["rollouts"] == found[0]["rollouts"] for rank in found)  # with the bits of their log-probabilities
    rows = rows_of(folder / topology)
    assert [row["rollout_differing"] for row in rows] == [0] * 3  # identity=exact holds in every layout
    return [row["loss"] for row in rows] + [row["critic_loss"] for row in rows if task == "ppo"]


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_losses_of_divided_models_are_those_of_one_rank(task, ranks, tmp_path):
    expected = losses_of(task, "dp", ranks=ranks, folder=tmp_path, count=1)
    for topology in DIVIDED:
        # fp32 sums in another order, and a loss is a small difference of larger terms
        found = losses_of(task, topology, ranks=ranks, folder=tmp_path, count=2)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), topology


def test_divided_experts_have_the_losses_of_one_rank(ranks, tmp_path):
    """Experts draw and train with rollout.identity=corrected. Without the router's losses, which have a term per micro-batch of all ranks."""
    rows = {}
    for topology, count in (("dp", 1), ("ep2", 2)):
        folder = tmp_path / topology
        options = ("model=tiny_moe", *SHORT, "rollout.identity=corrected", "model.balance_loss_weight=0")
        config = config_of("grpo", *options, f"topology={topology}", folder=folder, ranks=count)
        ranks(count).run(play, config=config)
        rows[topology] = rows_of(folder)
    for name in ("loss", "rollout_k1", "reward"):
        one, two = ([row[name] for row in rows[topology]] for topology in rows)
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("kernels", [False, True], ids=["products", "kernels"])
def test_rows_have_the_share_of_tokens_with_the_engines_experts(kernels, ranks, tmp_path):
    options = ("model=tiny_moe", *SHORT, "rollout.engine=generator", "rollout.identity=corrected")
    ranks(1).run(play, config=config_of("grpo", *options, folder=tmp_path), kernels=kernels)
    assert [row["rollout_experts"] for row in rows_of(tmp_path)] == [1.0] * 3


def routed_by_a_warm_start(process: Process, *, config) -> set[int]:
    """The numbers of tokens that routers get in a forward."""
    forward, counts = Router.forward, set()
    Router.forward = lambda self, tokens: (counts.add(len(tokens)), forward(self, tokens))[1]
    try:
        warm_start(config, process=process.arrange(policies.topology(config)))
    finally:
        Router.forward = forward
    return counts


def test_routers_of_a_warm_start_get_no_padding(ranks, tmp_path):
    options = ("model=tiny_moe", "rollout.identity=corrected", "data.seq_len=20")
    config = config_of("grpo", *options, folder=tmp_path, warm_start__steps=2)
    assert ranks(1).run(routed_by_a_warm_start, config=config) == [{16 * 12}]  # sixteen texts of twelve tokens


def samples_of(tokens: torch.Tensor, lengths: torch.Tensor) -> Samples:
    """Answers of all tokens but the first three."""
    numbers, three = torch.arange(len(tokens)), torch.full((len(tokens),), 3)
    return Samples(
        tokens=tokens,
        numbers=numbers,
        prompts=numbers,
        prompt_lengths=three,
        answer_lengths=lengths - 3,
        finished=numbers >= 0,
        logprobs=torch.zeros(tokens.shape),
        rewards=torch.zeros(len(tokens)),
        included=numbers >= 0,
    )


def with_experts(samples: Samples, *, generator: Generator) -> Samples:
    samples.experts = experts_of(samples, generator=generator)
    return samples


@torch.no_grad()
@pytest.mark.parametrize("family", [None, "Mixtral"])
def test_tokens_with_other_experts_are_counted(family):
    torch.manual_seed(0)
    model = sparse_decoder() if family is None else make(family).eval()
    generator, mask = Generator(model), torch.arange(12).expand(2, 12) >= 3
    samples = with_experts(samples_of(torch.randint(64, (2, 12)), torch.tensor([12, 12])), generator=generator)
    prefix = generator.own_model.chosen_experts(samples.tokens[1, :8].tolist())
    assert torch.equal(prefix, samples.experts[1, :8])  # as in the step that drew the token
    layout = lay_out(samples.tokens, lengths=samples.lengths, packs=family is None, device=torch.device("cpu"))
    with Routers(model).recorded() as found:
        layout.forward(model)
    given = {"layout": layout, "found": found}
    assert same_experts(samples, **given) == mask.sum()
    samples.experts[0, 5, 1] += 1
    samples.experts[1, 11] += 1  # nothing is predicted from the last token
    assert same_experts(samples, **given) == mask.sum() - 1


def logprobs_of(model, layout, mask) -> torch.Tensor:
    chosen = layout.tokens.flatten()[layout.places(mask)].unsqueeze(1)
    return answer_logits(model, layout=layout, mask=mask).log_softmax(-1).gather(1, chosen).squeeze(1)


@pytest.mark.parametrize("family", [None, "Mixtral", "Qwen2Moe"])
def test_replayed_experts_keep_ratios_near_one(family):
    """Two experts have equal scores and weights differ by 1e-7, so that the choice flips; replayed, the probabilities are the engine's."""
    torch.manual_seed(0)
    model = sparse_decoder() if family is None else make(family).eval()
    named = model.named_parameters()
    weights = [p for name, p in named if name.endswith(("router.weight", "gate.weight")) and len(p) > 1]
    tokens, lengths = torch.randint(64, (4, 12)), torch.tensor([12, 9, 12, 5])
    layout = lay_out(tokens, lengths=lengths, packs=True, device=torch.device("cpu"))
    mask = (torch.arange(12) < lengths[:, None]) & (torch.arange(12) > 2)
    forward, routers, gradients = model if family is None else CausalForward(model), Routers(model), []
    for given in (None, with_experts(samples_of(tokens, lengths), generator=Generator(model))):
        model.zero_grad()
        routers.begin(given, layout=layout)
        logprobs_of(forward, layout, mask).sum().backward()
        gradients.append([weight.grad for weight in weights])
    for own, replayed in zip(*gradients, strict=True):  # the choices are equal: the router learns as without a replay
        torch.testing.assert_close(replayed, own, rtol=1e-4, atol=1e-5)
    routers.begin(None)
    with torch.no_grad():
        for weight in weights:
            weight[1] = weight[0]
        generator = Generator(model)
        samples = with_experts(samples_of(tokens, lengths), generator=generator)
        texts = [row[:length].tolist() for row, length in zip(tokens, lengths.tolist(), strict=True)]
        drawn = torch.cat([scores[2:] for scores in generator.score(texts)])
        for weight in weights:
            weight[0] -= 1e-7 * weight[0].sign()
            weight[1] += 1e-7 * weight[1].sign()
        apart = (logprobs_of(forward, layout, mask) - drawn).abs()
        routers.begin(samples, layout=layout)
        near = (logprobs_of(forward, layout, mask) - drawn).abs()
    assert apart.max() > 1e-3  # another expert of the same score
    assert near.max() < 2e-5


def sparse_decoder() -> Decoder:
    shape = {"vocab_size": 64, "dim": 32, "layers": 4, "heads": 2, "kv_heads": 2, "hidden_dim": 64, "max_seq_len": 32}
    return Decoder(DecoderConfig(**shape, experts=8, experts_per_token=2, experts_every=1, expert_hidden_dim=16)).eval()


def routed(model: Decoder, tokens: torch.Tensor, lengths: torch.Tensor) -> tuple:
    """The layout of packed texts, and the experts that their tokens choose, best first: int64 [tokens, layers, choices]."""
    layout = lay_out(tokens, lengths=lengths, packs=True, device=torch.device("cpu"))
    with Routers(model).recorded() as found:
        layout.forward(model)
    return layout, torch.stack(found, dim=1)


@torch.no_grad()
def test_the_update_chooses_the_experts_of_the_rollout():
    """Also without a replay. Sums of other shapes round otherwise, which would move a choice between logits that are nearly equal."""
    torch.manual_seed(0)
    model = sparse_decoder()
    tokens, lengths = torch.randint(64, (16, 24)), torch.arange(16) % 5 + 4
    layout, chosen = routed(model, tokens, lengths + 16)
    equal = []
    for step in range(16):  # a rollout's forward, whose last tokens are answered
        drawn, experts = routed(model, tokens, lengths + step)
        last = lengths + step - 1
        equal.append((experts[drawn.at(last)] == chosen[layout.at(last)]).double())
    assert torch.cat(equal).mean() == 1.0


def play_with_large_logits(process: Process, *, config) -> dict:
    """The output layer computes only the requested rows, as for a large vocabulary."""
    before, losses.LARGE_LOGITS = losses.LARGE_LOGITS, 0
    try:
        return play(process, config=config)
    finally:
        losses.LARGE_LOGITS = before


def test_stages_with_large_logits_draw_single_texts(ranks, tmp_path):
    options = (
        "model.kv_heads=2",
        "warm_start.steps=1",
        "train.steps=1",
        "train.micro_batch_size=1",
        "topology=pp2",
        "rollout.stop_truncated_above=null",
    )
    config = config_of("grpo", *options, folder=tmp_path, ranks=2)
    first, second = ranks(2).run(play_with_large_logits, config=config)
    assert [rollout["tokens"] for rollout in first["rollouts"]] == [rollout["tokens"] for rollout in second["rollouts"]]
    assert [row["rollout_differing"] for row in rows_of(tmp_path)] == [0]


def test_a_changed_bit_is_named_where_ranks_have_parts_of_sequences(ranks, tmp_path):
    options = (
        "model.kv_heads=2",
        "warm_start.steps=1",
        "train.steps=1",
        "topology=sp2",
        "rollout.stop_truncated_above=null",
    )
    config = config_of("grpo", *options, folder=tmp_path, ranks=2)
    with pytest.raises(Exception, match="RolloutMismatch: step 1: 1 log-probabilities .*sample 7, position"):
        ranks(2).run(play, config=config, planted=7)
