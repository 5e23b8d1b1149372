"""int4 weights calibrated on a text: smaller errors of the layers' outputs, equal weights in every placement, and refusals."""

import pytest
import torch

from tests.inference.models import VOCABULARY, build, build_decoder, save_llama
from tests.inference.test_own_modules import build_other
from tests.inference.trained import held_out, trained_decoder
from ztk.config import ConfigError, Machine, compose
from ztk.inference import Generator, InferencePolicy, SamplingParams, open_packed, pack
from ztk.inference.calibration import Calibration
from ztk.inference.cut import Cut
from ztk.inference.describe import describe
from ztk.inference.kernel_products import RowsProduct
from ztk.inference.placement import Placement
from ztk.inference.products import Product
from ztk.inference.weights import collect
from ztk.kernels import quantise_weight
from ztk.kernels.shared.fitting import GROUP, fit_weight
from ztk.kernels.shared.weight_formats import widen
from ztk.serve import packing
from ztk.serve.__main__ import main
from ztk.serve.models import open_model
from ztk.zero.offload import OffloadPolicy

MLPS = {"native": 48, "qwen2_moe": 16}  # inner columns of an MLP or expert
TEXT = tuple((7 * place * place + 3 * place) % VOCABULARY for place in range(150))
CALIBRATED = InferencePolicy(weights="int4", calibration=TEXT)
PROMPTS = [[3, 1, 4], [5] * 20, list(range(70))]
GREEDY = SamplingParams(max_tokens=6, temperature=0)


def inputs(*, rows: int, columns: int, rank: int = 12) -> torch.Tensor:
    """Inputs with most of their variance in a few directions, like a layer's inputs."""
    generator = torch.Generator().manual_seed(rows)
    few = torch.randn(rows, rank, generator=generator) @ torch.randn(
        rank, columns, generator=torch.Generator().manual_seed(7)
    )
    return few + 0.1 * torch.randn(rows, columns, generator=generator)


def moments(x: torch.Tensor) -> torch.Tensor:
    return x.double().t() @ x.double()


def widened(weight: torch.Tensor, *, by: torch.Tensor | None) -> torch.Tensor:
    stored, scales = quantise_weight(weight, kind="int4", moments=by)
    return widen(stored, scales=scales, columns=weight.shape[1])


@pytest.mark.parametrize("columns", [64, 160])
def test_the_outputs_for_other_inputs_have_smaller_errors(columns):
    weight = torch.randn(48, columns, generator=torch.Generator().manual_seed(1))
    seen, unseen = inputs(rows=400, columns=columns), inputs(rows=300, columns=columns)

    def error(by: torch.Tensor | None) -> float:
        return float((unseen @ (widened(weight, by=by) - weight).t()).square().sum())

    assert error(moments(seen)) < 0.3 * error(None)
    assert torch.equal(widened(weight, by=moments(seen)), widened(weight, by=moments(seen)))
    # Each row is fitted alone, and inputs that the text does not use are zero.
    assert torch.equal(widened(weight[5:17], by=moments(seen)), widened(weight, by=moments(seen))[5:17])
    padded = torch.nn.functional.pad(weight, (0, GROUP))
    wider = fit_weight(padded, moments=moments(seen))
    assert all(
        torch.equal(more[:, : columns // GROUP], own)
        for more, own in zip(wider, fit_weight(weight, moments=moments(seen)), strict=True)
    )


def test_few_inputs_and_inputs_that_are_zero_have_weights_too():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    few = inputs(rows=3, columns=64)
    few[:, 10:40] = 0
    assert (widened(weight, by=moments(few)) - weight).abs().max() < 1
    assert torch.equal(widened(weight, by=moments(few * 0)), widened(weight, by=None))


def test_a_trained_model_stays_nearer():
    model, text = trained_decoder(steps=20), held_out()
    stored = Generator(model).score([text[:250], text[250:500]])

    def distance(policy: InferencePolicy) -> float:
        found = Generator(model, policy=policy).score([text[:250], text[250:500]])
        return sum(float((own - other).square().sum()) for own, other in zip(found, stored, strict=True))

    calibrated = InferencePolicy(weights="int4", calibration=tuple(text[1000:]))
    assert distance(calibrated) < 0.6 * distance(InferencePolicy(weights="int4"))


def answers(generator: Generator) -> list:
    return [(one.tokens, one.logprobs.tolist()) for [one] in generator.generate(PROMPTS, sampling=GREEDY)]


@pytest.mark.parametrize("family", ["native", "gpt2", "qwen2_moe"])
def test_streamed_and_packed_layers_have_the_weights_of_memory(family, tmp_path):
    model = build_decoder() if family == "native" else build(family)
    expected = answers(Generator(model, policy=CALIBRATED))
    assert expected != answers(Generator(model, policy=InferencePolicy(weights="int4")))
    assert expected == answers(Generator(model, policy=CALIBRATED))
    offload = OffloadPolicy(parameters="nvme", nvme_path=str(tmp_path), block_bytes=1 << 14, threads=2)
    streamed = Generator(model, policy=InferencePolicy(weights="int4", calibration=TEXT, offload=offload))
    assert answers(streamed) == expected
    streamed.close()
    options = {"subject": describe(model), "state": dict(model.named_parameters())}
    pack(tmp_path / "packed", weights="int4", calibration=TEXT, **options)
    assert answers(Generator(open_packed(tmp_path / "packed"), policy=InferencePolicy(weights="int4"))) == expected


@pytest.mark.parametrize("family", ["native", "qwen2_moe"])
def test_blocks_have_the_same_weights(family):
    """The kernels' weights have another layout."""
    model = build_decoder() if family == "native" else build(family)
    for products, kernels in zip(weights_of(model), weights_of(model, kernels=True), strict=True):
        for own, other in (
            (products.qkv, kernels.qkv),
            (products.out, kernels.out),
            (products.mlp.down, kernels.mlp.down),
        ):
            torch.testing.assert_close(shown(own), shown(other), rtol=2**-8, atol=1e-6)  # the products round to bf16


@pytest.mark.parametrize("family", ["native", "qwen2_moe"])
def test_two_ranks_have_the_weights_of_one(family):
    """Each rank records all inputs and fits its part of the weights with them."""
    model = build_decoder() if family == "native" else build(family)
    full, first, second = (weights_of(model, cut=cut) for cut in (None, Cut(rank=0, size=2), Cut(rank=1, size=2)))
    for whole, *parts in zip(full, first, second, strict=True):
        assert torch.equal(torch.cat([shown(part.out) for part in parts]), shown(whole.out))
        queries = [shown(part.qkv)[:, : part.out.shape[1]] for part in parts]
        assert torch.equal(torch.cat(queries, dim=1), shown(whole.qkv)[:, : whole.out.shape[1]])
        for mlp, *own in zip(
            whole.experts or [whole.mlp], *(part.experts or [part.mlp] for part in parts), strict=True
        ):
            half = MLPS[family] // 2  # of the inner columns, which are padded
            assert torch.equal(torch.cat([shown(part.down)[:half] for part in own]), shown(mlp.down)[: 2 * half])


def weights_of(model, *, cut: Cut | None = None, kernels: bool = False) -> list:
    """The calibrated layers of the model, or of a rank's part."""
    subject, state = describe(model), dict(model.named_parameters())
    options = {"description": subject.description, "placement": Placement(kind="int4", by_kernels=kernels), "cut": cut}
    return list(collect(state, inputs=Calibration(TEXT, subject=subject, state=state), **options).layers)


def shown(product: Product) -> torch.Tensor:
    """The weights that the product multiplies by, [in, out]: rows of one input each."""
    found = product(torch.eye(product.shape[1]))
    bias = product.tensors().get("bias") if not isinstance(product, RowsProduct) else product.bias
    return found if bias is None else found - bias


def test_a_file_of_text_or_lines_chooses_the_weights_of_a_packed_folder(tmp_path, capsys):
    save_llama(tmp_path / "model")
    opened = open_model(str(tmp_path / "model"))
    (tmp_path / "text.txt").write_text("abcde " * 40)
    (tmp_path / "lines.jsonl").write_text('{"text": "abc"}\n{"text": "de"}\n')
    text, lines = (
        packing.calibration_tokens(str(tmp_path / name), tokenizer=opened.tokenizer)
        for name in ("text.txt", "lines.jsonl")
    )
    assert text == tuple(opened.tokenizer.encode("abcde " * 40))
    assert lines == (*opened.tokenizer.encode("abc"), *opened.tokenizer.encode("de"))
    arguments = ["pack", str(tmp_path / "model"), str(tmp_path / "packed"), "--weights", "int4"]
    assert main([*arguments, "--calibration", str(tmp_path / "text.txt")]) == 0
    found = Generator(open_packed(tmp_path / "packed"), policy=InferencePolicy(weights="int4"))
    expected = Generator(opened.module, policy=InferencePolicy(weights="int4", calibration=text))
    assert answers_of_letters(found) == answers_of_letters(expected)
    options = {"weights": "int4", "to": str(tmp_path / "to"), "calibration": str(tmp_path / "text.txt")}
    streamed = packing.open_streamed(str(tmp_path / "model"), **options).module
    assert answers_of_letters(Generator(streamed, policy=InferencePolicy(weights="int4"))) == answers_of_letters(
        expected
    )
    assert packing.open_streamed(str(tmp_path / "model"), **options).module.path == streamed.path
    other = packing.open_streamed(str(tmp_path / "model"), **options | {"calibration": str(tmp_path / "lines.jsonl")})
    assert other.module.path != streamed.path
    capsys.readouterr()
    for choice, message in (("int8", "use weights=int4, or leave it out"), ("int4", "name the field text")):
        (tmp_path / "wrong.jsonl").write_text('{"words": "abc"}\n')
        arguments = ["pack", str(tmp_path / "model"), str(tmp_path / "again"), "--weights", choice]
        assert main([*arguments, "--calibration", str(tmp_path / "wrong.jsonl")]) == 2
        assert message in capsys.readouterr().err


def test_a_path_below_home_is_part_of_the_key_of_packed_weights(tmp_path, monkeypatch):
    save_llama(tmp_path / "model")
    (tmp_path / "text.txt").write_text("abcde " * 40)
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"weights": "int4", "ema": False}
    keys = {packing._key(tmp_path / "model", **options, calibration=text) for text in (None, "~/text.txt")}
    assert len(keys) == 2


def answers_of_letters(generator: Generator) -> list:
    return [(one.tokens, one.logprobs.tolist()) for [one] in generator.generate([[1, 2, 3]], sampling=GREEDY)]


def test_what_calibration_cannot_change_refuses_it(tmp_path):
    with pytest.raises(
        ValueError, match="inference.calibration with weights=int8: .* use weights=int4, or leave it out"
    ):
        InferencePolicy(weights="int8", calibration=TEXT)
    with pytest.raises(ValueError, match="inference.calibration with model_type=cohere, which runs its own modules"):
        Generator(build_other("cohere"), policy=CALIBRATED)
    model = build_decoder()
    with pytest.raises(ValueError, match="inference.calibration with inference.adapters={one}: .* merge the adapter"):
        Generator(model, policy=CALIBRATED, adapters={"one": {}})
    with pytest.raises(ValueError, match=f"inference.calibration has a token outside of 0 to {VOCABULARY - 1}"):
        Generator(model, policy=InferencePolicy(weights="int4", calibration=(1, VOCABULARY)))
    options = {"subject": describe(model), "state": dict(model.named_parameters())}
    packed = pack(tmp_path / "packed", weights="int4", **options)
    with pytest.raises(ValueError, match="inference.calibration with .*packed, whose packed weights are final"):
        Generator(packed, policy=CALIBRATED)


def test_the_command_line_names_a_file_for_int4(tmp_path):
    save_llama(tmp_path / "model")
    (tmp_path / "text.txt").write_text("abcde")
    words = ("task=generate", f"inference.model={tmp_path / 'model'}")
    out = {"output_dir": str(tmp_path / "run"), "machine": Machine(gpus=0, cores=2)}
    chosen = compose(*words, "weights=int4", f"inference.calibration={tmp_path / 'text.txt'}", **out)
    assert chosen.inference.calibration == str(tmp_path / "text.txt")
    with pytest.raises(ConfigError, match="inference.calibration with weights=int8"):
        compose(*words, "weights=int8", f"inference.calibration={tmp_path / 'text.txt'}", **out)
    with pytest.raises(ConfigError, match="inference.calibration=.*: is no file"):
        compose(*words, "weights=int4", f"inference.calibration={tmp_path / 'none.txt'}", **out)
