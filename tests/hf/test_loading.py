"""`from_pretrained` and `from_config` at stage 3: sharded while built, read by slices."""

import pytest
import torch

from tests.hf import small


def hf_config():
    """The object through which transformers detects stage 3. It must exist while the model is loaded."""
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})


def loaded(*, source: str) -> dict:
    """Bytes read from files, in total and at most at once, bytes of full parameters in memory, the values afterwards, and the missing and
    unused names."""
    from transformers import AutoModelForCausalLM

    import ztk.deepspeed as deepspeed
    from ztk.hf import loading
    from ztk.hf.slices import TensorSlice

    sizes, read = [], TensorSlice.read

    def counted(entry: TensorSlice, start: int, stop: int) -> torch.Tensor:
        values = read(entry, start, stop)
        sizes.append(values.nbytes)
        return values

    TensorSlice.read = counted
    keep = hf_config()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True)
    finally:
        TensorSlice.read = read
    assert keep.is_zero3()
    in_memory = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    values = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            values[name] = parameter.detach().clone()
    return {
        "read": loading.read_bytes(model),
        "at_once": max(sizes),
        "in_memory": in_memory,
        "values": values,
        "info": info,
    }


def same_values(found: dict, model: torch.nn.Module) -> int:
    """Asserts that all are equal; how many bytes they have."""
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return sum(value.nbytes for value in expected.values())


def test_every_rank_reads_its_slices(hf, model_folder):
    from transformers import AutoModelForCausalLM

    results = hf(loaded, source=model_folder)
    total = same_values(results[0]["values"], AutoModelForCausalLM.from_pretrained(model_folder))
    largest = max(value.nbytes for value in results[0]["values"].values())
    row = 4 * 96  # a slice that ends inside a row reads all of it; the widest is the one of down_proj
    for found in results:
        assert not found["info"]["missing_keys"] and not found["info"]["unexpected_keys"]
        assert total / 2 <= found["read"] <= total / 2 + row * len(found["values"])
        assert found["at_once"] <= largest / 2 + row
        assert found["in_memory"] < 0.01 * total


def test_a_checkpoint_in_another_form_is_converted_by_groups(hf, tmp_path):
    """Mixtral's files have one tensor per expert, the model has one for all."""
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": small.VOCABULARY}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    results = hf(loaded, source=str(tmp_path))
    total = same_values(results[0]["values"], AutoModelForCausalLM.from_pretrained(tmp_path))
    assert not results[0]["info"]["missing_keys"]
    assert total / 2 < results[0]["read"] <= 1.05 * total  # experts are read completely by every rank


def test_what_the_checkpoint_lacks_is_initialised(hf, tmp_path):
    """A head that is not tied, and files of the body alone: the head is new, the same on all ranks, the rest is read."""
    from transformers import LlamaModel

    torch.manual_seed(0)
    body = LlamaModel(small.llama_config())
    body.save_pretrained(tmp_path)
    results = hf(loaded, source=str(tmp_path))
    values = results[0]["values"]
    assert results[0]["info"]["missing_keys"] == {"lm_head.weight"}
    assert torch.equal(values["model.embed_tokens.weight"], body.embed_tokens.weight)
    head = values["lm_head.weight"]
    assert torch.equal(head, results[1]["values"]["lm_head.weight"])
    assert head.std().item() == pytest.approx(0.02, rel=0.1)  # initializer_range; 2560 values: 1.4 % standard error


def enlarged(*, source: str, tokens: int, stage: int) -> list[torch.Tensor]:
    """A model with `tokens` tokens and a value head that a script draws behind it: the embedding, the model's head, the value head."""
    from transformers import AutoModelForCausalLM

    import ztk.deepspeed as deepspeed

    torch.manual_seed(5)
    keep = hf_config() if stage == 3 else None
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(tokens)
    head = torch.nn.Linear(small.WIDTH, 1, bias=False)
    assert keep is None or keep.is_zero3()
    found = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    with deepspeed.zero.GatheredParameters(found, enabled=stage == 3):
        return [weight.detach().clone() for weight in (*found, head.weight)]


@pytest.mark.parametrize("tokens", [small.VOCABULARY, small.VOCABULARY + 8], ids=["as it is", "larger"])
def test_a_head_behind_a_resized_model_starts_alike_at_all_stages(hf, model_folder, tokens):
    """DeepSpeed-Chat's reward models: draws after `resize_token_embeddings` start from the same state of torch's generator."""
    plain, sharded = (hf(enlarged, source=model_folder, tokens=tokens, stage=stage)[0] for stage in (0, 3))
    assert len(plain[0]) == len(plain[1]) == tokens
    assert all(torch.equal(*pair) for pair in zip(plain, sharded, strict=True))


def built(*, tie: bool) -> dict:
    """`from_config`: parameters without memory; then a forward under the engine."""
    from transformers import AutoModelForCausalLM

    import ztk.deepspeed as deepspeed

    config = small.ds_config(3, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    config = {**config, "gradient_clipping": 1.0, "gradient_accumulation_steps": 1, "train_batch_size": 4}
    config.update(train_micro_batch_size_per_gpu=2, fp16={"enabled": False}, bf16={"enabled": False})
    keep = hf_config()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small.llama_config(tie_word_embeddings=tie))
    assert keep.is_zero3()
    in_memory = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    tokens = torch.tensor([row["input_ids"] for row in small.rows(2)])
    losses = []
    for _ in range(6):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return {"losses": losses, "in_memory": in_memory, "parameters": sum(p.nbytes for p in model.parameters())}


@pytest.mark.parametrize("tie", [False, True], ids=["two", "tied"])
def test_from_config_under_init(hf, tie):
    found = hf(built, tie=tie)[0]
    assert found["in_memory"] < 0.01 * found["parameters"]
    assert found["losses"][0] == pytest.approx(3.69, abs=0.15)  # ln 40 at the start
    assert found["losses"][-1] < 0.7 * found["losses"][0]


def kept_alive(*, source: str, way: str) -> dict:
    """`from_pretrained` under an Init of the script's own, and initialize inside or after it; the values before it and the first loss."""
    from transformers import AutoModelForCausalLM

    import ztk.deepspeed as deepspeed

    config = small.ds_config(3, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    config = {**config, "gradient_clipping": 1.0, "gradient_accumulation_steps": 1, "train_batch_size": 4}
    config.update(train_micro_batch_size_per_gpu=2, fp16={"enabled": False}, bf16={"enabled": False})
    keep = hf_config()
    with deepspeed.zero.Init(config_dict_or_path=config), deepspeed.zero.Init(config_dict_or_path=config):
        model = AutoModelForCausalLM.from_pretrained(source)
        values = {}
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter):
                values[name] = parameter.detach().clone()
        if way == "inside":
            engine, *_ = deepspeed.initialize(model=model, config=config)
    if way == "after":
        engine, *_ = deepspeed.initialize(model=model, config=config)
    assert keep.is_zero3()
    tokens = torch.tensor([row["input_ids"] for row in small.rows(2)])
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return {"values": values, "loss": loss.item()}


@pytest.mark.parametrize("way", ["inside", "after"])
def test_an_init_of_the_scripts_own_around_from_pretrained(hf, model_folder, way):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    tokens = torch.tensor([row["input_ids"] for row in small.rows(2)])
    expected = plain(input_ids=tokens, labels=tokens).loss.item()
    for found in hf(kept_alive, source=model_folder, way=way):
        same_values(found["values"], plain)
        assert found["loss"] == pytest.approx(expected, rel=1e-5)  # fp32; another order of sums over 8 tokens


def resized(*, source: str) -> dict:
    """More words, at stage 3, before the engine."""
    from transformers import AutoModelForCausalLM

    import ztk.deepspeed as deepspeed

    keep = hf_config()
    model = AutoModelForCausalLM.from_pretrained(source)
    before = model.get_input_embeddings().weight
    with deepspeed.zero.GatheredParameters(before):
        old = before.detach().clone()
    torch.manual_seed(5)  # the new rows are drawn by each rank; `initialize` takes rank 0's
    model.resize_token_embeddings(len(old) + 3, mean_resizing=False)
    assert keep.is_zero3()
    weight = model.get_input_embeddings().weight
    with deepspeed.zero.GatheredParameters([weight, None]):
        return {"old": old, "new": weight.detach().clone()}


def test_resizing_the_embedding_at_stage_3(hf, model_folder):
    first, second = hf(resized, source=model_folder)
    assert first["new"].shape[0] == first["old"].shape[0] + 3
    assert torch.equal(first["new"][: len(first["old"])], first["old"]) and first["new"].isfinite().all()
    assert torch.equal(first["new"], second["new"])
