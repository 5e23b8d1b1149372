"""`generate` of init_inference runs on ztk's inference engine where that has the same answer."""

import pytest
import torch

import ztk.deepspeed as deepspeed
from tests.deepspeed.serving import small


def made(**more):
    return deepspeed.init_inference(small.llama(), **{"dtype": "fp32"} | more)


def engine_of(engine):
    return engine._answers._generator


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, mask = small.prompts(), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    return tokens, mask


def test_texts_equal_the_modules_loop():
    """Padded prompts, penalties, an end token in the middle of one answer, a length that counts the prompt."""
    tokens, mask = padded()
    plain, engine = small.llama(), made()
    end = int(plain.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 12])
    for more in (
        {"max_new_tokens": 12, "attention_mask": mask, "eos_token_id": None},
        {"max_new_tokens": 12, "eos_token_id": end, "pad_token_id": 0},
        {"max_new_tokens": 12, "eos_token_id": end, "pad_token_id": 0, "min_new_tokens": 9},
        {"max_length": 15, "eos_token_id": None, "repetition_penalty": 1.3},
    ):
        found, expected = (each.generate(tokens, do_sample=False, **more) for each in (engine, plain))
        assert torch.equal(found, expected), more
    assert engine_of(engine) is not None


def test_draws_follow_torchs_seed():
    engine, tokens = made(), small.prompts()
    options = {"max_new_tokens": 16, "do_sample": True, "num_return_sequences": 2, "eos_token_id": None}
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(engine.generate(tokens, **options))
    assert engine_of(engine) is not None and found[0].shape == (4, 25)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert not torch.equal(found[0][0], found[0][1])  # answers of one prompt


def test_weights_that_a_script_changes_are_read_again():
    engine, plain, tokens = made(), small.llama(), small.prompts()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    before = engine.generate(tokens, **options)
    for model in (engine.module, plain):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.flip(0))
    after = engine.generate(tokens, **options)
    assert torch.equal(after, plain.generate(tokens, **options)) and not torch.equal(before, after)
    assert engine_of(engine) is not None


@pytest.mark.parametrize(
    "more",
    [{"num_beams": 2}, {"bad_words_ids": [[5]]}, {"return_dict_in_generate": True}, {"output_scores": True}],
    ids=lambda more: next(iter(more)),
)
def test_what_the_engine_does_not_do_is_done_by_the_module(more):
    engine = made()
    engine.generate(small.prompts(), max_new_tokens=2, do_sample=False, **more)
    assert engine_of(engine) is None


def test_hooks_and_16_bits_keep_the_modules_loop():
    engine, seen = made(), []
    engine.module.model.layers[0].register_forward_hook(lambda *given: seen.append(1))
    engine.generate(small.prompts(), max_new_tokens=2, do_sample=False)
    assert engine_of(engine) is None and len(seen) == 2
    half = made(dtype="bf16")
    assert half.generate(small.prompts(), max_new_tokens=2, do_sample=False).shape == (2, 11)
    assert "16 bits" in half._answers.reason


def test_destroy_frees_the_copies():
    engine = made()
    small.greedy(engine, small.prompts(), new=2)
    engine.destroy()
    assert engine._answers is None
