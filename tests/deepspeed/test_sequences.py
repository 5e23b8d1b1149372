"""Sequences that a script divides over two ranks, against the same model on full sequences."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from ztk.core.runtime import Process
from ztk.deepspeed.names.tree import module_of

RANKS, BATCH, TOKENS = 2, 2, 12
# The same sums in fp32 in another order: attention over other tiles, gradients as a mean of two ranks. Each rounding is 6e-8 of its
# value; tens of them add up in a loss near 4, hundreds in a weight that lr=1e-2 has moved three times.
LOSS, WEIGHT = 2e-5, 1e-4
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": RANKS,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0,
}


def llama(*, kv_heads: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=kv_heads))


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    """One for each rank; some labels do not count, more of them in the first half."""
    made = []
    for rank in range(RANKS):
        tokens = torch.randint(1, 64, (BATCH, TOKENS), generator=torch.Generator().manual_seed(RANKS * step + rank))
        labels = tokens.clone()
        labels[0, : 4 + rank] = -100
        positions = torch.arange(TOKENS).repeat(BATCH, 1)
        made.append({"input_ids": tokens, "labels": labels, "position_ids": positions})
    return made


def loss_of(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), shift_labels.flatten(), ignore_index=-100)


def divided(process: Process, *, stage: int, kv_heads: int) -> dict:
    """As Accelerate and ArcticTraining write it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ulysses = module_of("deepspeed.runtime.sequence_parallel.ulysses_sp")
    groups = module_of("deepspeed.utils.groups")
    model = llama(kv_heads=kv_heads)
    mpu = ulysses.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=RANKS,
        micro_batch_size=BATCH,
    )
    try:
        zero = {"stage": stage, "reduce_bucket_size": 600} | (
            {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        )
        engine, *_ = deepspeed.initialize(model=model, config=CONFIG | {"zero_optimization": zero}, mpu=mpu)
        group = groups._get_sequence_parallel_group()
        loader = ulysses.UlyssesSPDataLoaderAdapter(
            [batches(step)[process.rank] for step in range(3)],
            sp_rank=groups._get_sequence_parallel_rank(),
            sp_group=group,
            sp_world_size=groups._get_sequence_parallel_world_size(),
            device=engine.device,
        )
        losses = []
        for batch in loader:
            shift_labels = batch.pop("shift_labels")
            own = loss_of(engine(**batch).logits, shift_labels)
            counts = [torch.zeros((), dtype=torch.int64) for _ in range(RANKS)]
            dist.all_gather(counts, (shift_labels != -100).sum(), group=group)
            parts = all_gather(own, group=group)
            loss = sum(part * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        found = {
            "losses": losses,
            "weights": {name: value.clone() for name, value in engine.engine.zero.full_parameters()},
            "sizes": (engine.train_batch_size(), engine.dp_world_size, engine.seq_dp_world_size, len(loader)),
            "steps": engine.global_steps,
            "groups": (
                dist.get_process_group_ranks(engine.get_sequence_parallel_group()),
                engine.get_data_parallel_rank(),
            ),
        }
        found["weights"] = {name: value.clone() for name, value in found["weights"].items()}
        engine.destroy()
        return found
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = ALL_ATTENTION_FUNCTIONS["sdpa"].core


def full(*, kv_heads: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch with full sequences, two per step."""
    model = llama(kv_heads=kv_heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        for batch in batches(step):
            shift_labels = F.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
            loss = loss_of(model(**batch).logits, shift_labels)
            (loss / RANKS).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize(("stage", "kv_heads"), [(0, 4), (2, 1), (3, 2)])
def test_a_hugging_face_model_on_parts_of_sequences(ranks, stage, kv_heads):
    """With as many key heads as query heads, with fewer, and with one that both ranks need."""
    results = ranks(RANKS).run(divided, stage=stage, kv_heads=kv_heads)
    losses, weights = full(kv_heads=kv_heads)
    for rank, found in enumerate(results):
        assert found["losses"] == pytest.approx(losses, abs=LOSS)
        assert found["steps"] == 3 and found["sizes"] == (RANKS * BATCH, 1, RANKS, 3 * RANKS)
        assert found["groups"] == ([0, 1], 0), rank
    for name, value in results[0]["weights"].items():
        torch.testing.assert_close(value, weights[name], atol=WEIGHT, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def attention(query, key, value, *, tokens_first: bool, folded: bool) -> torch.Tensor:
    query, key, value = (x.permute(1, 2, 0, 3) if tokens_first else x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    out = out.permute(2, 0, 1, 3) if tokens_first else out.transpose(1, 2)
    return out.flatten(2) if folded else out


def around_a_layer(process: Process, *, tokens_first: bool, folded: bool, kv_heads: int) -> dict:
    layer = module_of("deepspeed.sequence.layer").DistributedAttention(attention, dist.group.WORLD)
    draw = torch.Generator().manual_seed(3)
    inputs = [torch.randn(BATCH, TOKENS, heads, 8, generator=draw) for heads in (4, kv_heads, kv_heads)]
    d_out = torch.randn(BATCH, TOKENS, 4, 8, generator=draw)
    layout = (lambda x: x.transpose(0, 1).contiguous()) if tokens_first else (lambda x: x)
    entire = [layout(x).requires_grad_() for x in inputs]
    out = attention(*entire, tokens_first=tokens_first, folded=folded)
    out.backward(layout(d_out).reshape(out.shape))
    dim = 0 if tokens_first else 1
    cut = lambda x: x.detach().chunk(RANKS, dim=dim)[process.rank]  # noqa: E731
    own = [cut(x).requires_grad_() for x in entire]
    got = layer(*own, int(tokens_first), tokens_first=tokens_first, folded=folded)
    got.backward(cut(layout(d_out)).reshape(got.shape))
    errors = [
        (got - cut(out)).abs().max(),
        *((a.grad - cut(b.grad)).abs().max() for a, b in zip(own, entire, strict=True)),
    ]
    return {"errors": [float(error) for error in errors], "shape": tuple(got.shape)}


@pytest.mark.parametrize(("tokens_first", "folded", "kv_heads"), [(False, False, 4), (True, False, 2), (True, True, 1)])
def test_attention_between_two_exchanges(ranks, tokens_first, folded, kv_heads):
    """Outputs and all gradients of one layer; sums of 12 products in another order."""
    for found in ranks(RANKS).run(around_a_layer, tokens_first=tokens_first, folded=folded, kv_heads=kv_heads):
        assert max(found["errors"]) < 1e-5
        assert found["shape"] == ((6, 2) if tokens_first else (2, 6)) + ((32,) if folded else (4, 8))


def refused(process: Process) -> dict[str, str]:
    hf = module_of("deepspeed.runtime.sequence_parallel.ulysses_sp")
    register = hf.UlyssesSPAttentionHF.register_with_transformers
    model = llama(kv_heads=2)
    common = {"core_attn_implementation": "sdpa", "sequence_parallel_size": 2, "micro_batch_size": 1}
    kind = {
        "attn": attention,
        "batch_size": 1,
        "attn_head_size": 8,
        "num_hidden_layers": 1,
        "process_group": dist.group.WORLD,
    }
    layer = hf.UlyssesSPAttentionHF(**kind, attn_head_count=4, kv_head_count=2)
    heads = torch.zeros(1, 4, 6, 8)
    adapter = lambda batch: hf.UlyssesSPDataLoaderAdapter([batch], process.rank, dist.group.WORLD, 2, "cpu")  # noqa: E731
    tokens = {name: torch.arange(5)[None] for name in ("input_ids", "labels", "position_ids")}
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    padded = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    tries = {
        "eager": lambda: register(model, **common | {"core_attn_implementation": "eager"}),
        "another": lambda: register(model, **common | {"core_attn_implementation": "flex_attention"}),
        "three": lambda: register(model, **common | {"sequence_parallel_size": 3}),
        "heads": lambda: hf.UlyssesSPAttentionHF(**kind, attn_head_count=3, kv_head_count=3),
        "positions": lambda: layer(nn.Module(), heads, heads, heads, None),
        "packed": lambda: layer(nn.Module(), heads, heads, heads, None, position_ids=packed),
        "padding": lambda: layer(nn.Module(), heads, heads, heads, padded, position_ids=packed),
        "no labels": lambda: next(adapter({"input_ids": packed})),
        "five": lambda: next(adapter(tokens)),
        "mesh": lambda: deepspeed.initialize(model=model, config=CONFIG, mesh_param=(2, 2)),
        "sizes": lambda: deepspeed.initialize(model=model, config=CONFIG | {"sequence_parallel_size": 3}),
        "tensor": lambda: deepspeed.initialize(
            model=model, config=CONFIG | {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}
        ),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


def test_what_would_be_wrong_is_refused(ranks):
    found = ranks(RANKS).run(refused)[0]
    for name, part in {
        "eager": "must be one of",
        "another": "make them equal",
        "three": "divide the 2 ranks",
        "heads": "3 heads cannot be distributed",
        "positions": "position_ids are missing",
        "packed": "start anew",
        "padding": "padding is not seen",
        "no labels": "position_ids and labels",
        "five": "pad them to a multiple of 2",
        "mesh": "mesh_param=(2, 2): 2 ranks must be",
        "sizes": "sequence_parallel_size)=(0, 3)",
        "tensor": "leave one of them out",
    }.items():
        assert part in found.get(name, "nothing"), (name, found.get(name))


def test_tiles_equal_one_piece():
    """Rows of a matrix product are independent: outputs are equal bit by bit or in the last place; gradients of weights add up over tiles."""
    tiles = module_of("deepspeed.runtime.sequence_parallel.ulysses_sp")
    torch.manual_seed(0)
    mlp, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(2, 10, 8)
    y, mask = torch.randint(0, 8, (2, 10)), torch.ones(2, 10)
    total = lambda self, x, y: F.cross_entropy(self(x), y, reduction="sum")  # noqa: E731
    masked = lambda self, x, y, mask: (F.cross_entropy(self(x), y, reduction="none") * mask).sum()  # noqa: E731
    ways = {
        "mlp": lambda x: tiles.TiledMLP.apply(lambda self, x: self(x), mlp, x, 3, list(mlp.parameters())).square().sum(),
        "compute": lambda x: tiles.sequence_tiled_compute(
            lambda x, scale: mlp(x) * scale, 10, 4, {"x": x}, {"scale": 1.0}, "x", output_reduction=None
        ).square().sum(),
        "mean": lambda x: 2 * 10 * 8 * tiles.sequence_tiled_compute(
            lambda x: mlp(x).square().mean(), 10, 5, {"x": x}, {}, "x", output_unshard_dimension=0
        ),
        "loss": lambda x: tiles.TiledFusedLogitsLoss.apply(total, mlp, x, y, None, 3, list(mlp.parameters()), "sum"),
        "masked": lambda x: tiles.TiledFusedLogitsLoss.apply(masked, mlp, x, y, mask, 3, None, "sum"),
    }  # fmt: skip
    for name, way in ways.items():
        results = []
        for compute in (
            way,
            lambda x, n=name: (
                total(mlp, x.flatten(0, 1), y.flatten()) if n in ("loss", "masked") else mlp(x).square().sum()
            ),
        ):
            leaf = x.clone().requires_grad_()
            mlp.zero_grad()
            value = compute(leaf)
            value.backward()
            results.append([value.detach(), leaf.grad, *(p.grad.clone() for p in mlp.parameters())])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, msg=lambda text, n=name: f"{n}: {text}")
    with pytest.raises(ValueError, match="must begin with the same"):
        tiles.TiledFusedLogitsLoss.apply(total, mlp, x, y[:, :5], None, 3, None, "sum")
    with pytest.raises(ValueError, match="must be mean or sum"):
        tiles.TiledFusedLogitsLoss.apply(total, mlp, x, y, None, 3, None, "max")
