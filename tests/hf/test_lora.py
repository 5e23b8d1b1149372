"""Adapters over frozen weights that are sharded: peft's losses, the base's bits, and a folder that peft loads."""

import hashlib
from dataclasses import replace

import pytest
import torch

from tests.hf.test_causal import PIPELINE2, RELATIVE, TENSOR2, Strategy, plain, saved, trained, words
from tests.parallel.topology.families import make
from ztk import checkpoint
from ztk.checkpoint.export import export_adapter
from ztk.core.policies.model import LoraPolicy
from ztk.core.runtime import Process
from ztk.hf.causal import open_causal

LORA = LoraPolicy(rank=4, alpha=8.0, targets=("all-linear",))
FEW = {"Llama": ("q_proj", "down_proj"), "GPT2": ("c_attn", "c_proj"), "OPT": ("k_proj", "fc1", "fc2")}


def train(
    process: Process, *, folder: str, strategy: Strategy, lora: LoraPolicy, to: str
) -> tuple[list[float], str, int]:
    """Losses, a digest of the frozen weights, and elements that train on this rank. A checkpoint in `to`."""
    engine = trained(process, folder=folder, strategy=strategy, losses=(losses := []), lora=lora)
    checkpoint.save(engine, folder=to, trained_only=True)
    state, digest = checkpoint.full_state_dict(engine, everywhere=True), hashlib.sha256()
    for name in sorted(name for name in state if "lora_" not in name):
        digest.update(state[name].numpy().tobytes())
    count = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    engine.close()
    return losses, digest.hexdigest(), count


def by_peft(*, family: str, folder: str, lora: LoraPolicy) -> list[float]:
    """The same by peft and torch alone, from ztk's first values of the adapters."""
    from peft import LoraConfig, get_peft_model

    model, values = open_causal(folder, init="pretrained", seed=1, lora=lora)
    described = model.peft_config["default"].to_dict()
    given = {name: described[name] for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "fan_in_fan_out")}
    reference = get_peft_model(make(family), LoraConfig(**given, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "lora_" in name:
                own = name.removeprefix("base_model.model.")
                parameter.copy_(values(name=own, start=0, stop=parameter.numel()).view(parameter.shape))
    return plain(reference)


CASES = {
    "Llama stage 0": ("Llama", Strategy(stage=0)),
    "Llama stage 2 cpu": ("Llama", Strategy(stage=2, offload="cpu")),
    "Llama stage 3 nvme recompute": ("Llama", Strategy(stage=3, offload="nvme", recompute="full")),
    "GPT2 stage 1": ("GPT2", Strategy(stage=1)),
    "Llama tp2 stage 3": ("Llama", Strategy(stage=3, topology=TENSOR2)),
    "GPT2 tp2": ("GPT2", Strategy(stage=1, topology=TENSOR2)),
    "OPT tp2": ("OPT", Strategy(topology=TENSOR2)),
    "Llama pp2": ("Llama", Strategy(stage=1, topology=PIPELINE2)),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_pefts_and_the_base_keeps_its_bits(ranks, tmp_path, case):
    from peft import PeftModel

    family, strategy = CASES[case]
    folder, saves = saved(tmp_path, family=family), str(tmp_path / "saves")
    lora = LORA if case.endswith("stage 3 nvme recompute") else replace(LORA, targets=FEW[family])
    expected = by_peft(family=family, folder=folder, lora=lora)
    base = make(family)
    digest = hashlib.sha256()
    for _, value in sorted(base.state_dict().items()):
        digest.update(value.numpy().tobytes())
    found = ranks(2).run(train, folder=folder, strategy=strategy, lora=lora, to=saves)
    for losses, bits, _ in found:
        assert losses == pytest.approx(expected, rel=RELATIVE)
        assert bits == digest.hexdigest()
    export_adapter(saves, to=tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert sum(parameter.numel() for name, parameter in loaded.named_parameters() if "lora_" in name) >= found[0][2]
    tokens, targets = words(0, number=0)
    with torch.no_grad():
        adapted = torch.nn.functional.cross_entropy(loaded(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
        with loaded.disable_adapter():
            before = torch.nn.functional.cross_entropy(loaded(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
    assert float(adapted) < float(before)  # it has learnt these tokens


def test_targets_that_name_nothing_are_refused(tmp_path):
    folder = saved(tmp_path, family="Llama")
    with pytest.raises(
        ValueError, match="lora.targets=c_attn: no linear layer has that name; the model has down_proj, gate_proj"
    ):
        open_causal(folder, init="pretrained", seed=1, lora=replace(LORA, targets=("q_proj", "c_attn")))


@pytest.mark.parametrize(("family", "changes"), [("GPT2", {}), ("Llama", {"tie_word_embeddings": True})])
def test_a_tied_output_layer_is_refused(tmp_path, family, changes):
    """Merged into the weight, its adapter would change the embedding, too."""
    make(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"lora.targets=lm_head: its weight is .*(wte|embed_tokens).weight, too, .* name other layers"
    ):
        open_causal(str(tmp_path), init="pretrained", seed=1, lora=replace(LORA, targets=("lm_head",)))
