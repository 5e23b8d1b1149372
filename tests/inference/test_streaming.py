"""Layers that are read from a packed folder: the resident engine's bits, bytes that are counted, memory that does not follow the model."""

import gc
import json
import weakref
from collections.abc import Mapping

import pytest
import torch

from tests.inference.models import build, build_decoder
from ztk.inference import Generator, InferencePolicy, SamplingParams, open_packed, pack
from ztk.inference.capacity import BUFFERS, Rates, Sizes, free_memory, plan_stream
from ztk.inference.describe import describe
from ztk.inference.packed import LAYERS, MANIFEST
from ztk.inference.stream import StreamedLayers
from ztk.zero.offload import DiskError, OffloadPolicy, io_engine

PROMPTS = [[1, 2, 3], [4, 5, 6, 7] * 20, [9] * 70]
SAMPLING = SamplingParams(max_tokens=6, temperature=0.8, seed=3, prompt_logprobs=True)
ROWS = 64


def offload(folder) -> OffloadPolicy:
    return OffloadPolicy(parameters="nvme", nvme_path=str(folder), block_bytes=1 << 14, threads=2)


def packed_model(model, *, folder, weights="stored"):
    return pack(folder, subject=describe(model), state=dict(model.named_parameters()), weights=weights)


def with_layers(packed, *, resident, folder, sequences=2, **more) -> Generator:
    """A generator whose memory holds `resident` layers in addition to its ring."""
    options = {
        "weights": packed.weights,
        "offload": offload(folder),
        "max_sequences": sequences,
        "max_step_tokens": ROWS,
    }
    roomy = Generator(packed, policy=InferencePolicy(**options))
    assert roomy.plan is not None and roomy.plan.pass_bytes == 0
    sizes = roomy.plan.sizes
    roomy.close()
    held = sizes.fixed + sequences * sizes.sequence + sizes.working(sequences=sequences, rows=ROWS)
    memory = held + (resident + BUFFERS) * sizes.layer
    return Generator(packed, policy=InferencePolicy(**options, memory_bytes=memory, **more))


def values(answers) -> list:
    return [
        (answer.tokens, answer.logprobs.tolist(), answer.prompt_logprobs.tolist())
        for found in answers
        for answer in found
    ]


CASES = [
    ("native", "stored", 2),
    ("native", "int4", 0),
    ("mixtral", "int8", 1),
    ("gpt2", "stored", 0),
    ("gemma3", "int4", 1),
]


@pytest.mark.parametrize("family, weights, resident", CASES)
def test_streamed_layers_change_no_bit_and_their_bytes_are_counted(family, weights, resident, tmp_path, monkeypatch):
    layers = 6 if resident else 4
    own = {"n_layer": layers} if family == "gpt2" else {"num_hidden_layers": layers}
    if family == "gemma3":
        own["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    model = build_decoder(layers=layers) if family == "native" else build(family, **own)
    expected = Generator(model, policy=InferencePolicy(weights=weights)).generate(PROMPTS, sampling=SAMPLING)
    packed = packed_model(model, folder=tmp_path / "packed", weights=weights)
    generator = with_layers(packed, resident=resident, folder=tmp_path)
    assert generator.plan.resident == resident and generator.plan.buffers == BUFFERS
    forward, passes, before = generator._model.forward, [], generator.streamed_bytes
    monkeypatch.setattr(
        generator._model, "forward", lambda *given, **named: passes.append(1) or forward(*given, **named)
    )
    assert values(generator.generate(PROMPTS, sampling=SAMPLING)) == values(expected)
    assert generator.plan.pass_bytes == (layers - resident) * packed.layer_bytes
    assert generator.streamed_bytes - before == len(passes) * generator.plan.pass_bytes
    generator.close()


def test_a_buffer_that_is_refilled_too_early_is_noticed(tmp_path, monkeypatch):
    """Planted: the next layer is read into the buffer of the current one."""
    model = build_decoder(layers=6)
    expected = Generator(model).generate(PROMPTS, sampling=SAMPLING)
    generator = with_layers(packed_model(model, folder=tmp_path / "packed"), resident=0, folder=tmp_path)

    def early(self):
        for _ in range(6):
            buffer = self._ring.popleft()
            self._wait(buffer)
            self._spare.append(buffer)
            self._fill()
            self.settle()
            yield buffer.layer

    monkeypatch.setattr(StreamedLayers, "__iter__", early)
    assert values(generator.generate(PROMPTS, sampling=SAMPLING)) != values(expected)
    generator.close()


@pytest.mark.parametrize("weights", ["stored", "int4"])
def test_layers_are_read_where_they_are_computed(weights, tmp_path, monkeypatch):
    """No byte of them is copied, those in oneDNN's layout included."""
    packed = packed_model(build_decoder(layers=6), folder=tmp_path / "packed", weights=weights)
    generator = with_layers(packed, resident=0, folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(io_engine, "_copy", None)
        assert len(generator.generate(PROMPTS, sampling=SAMPLING)) == 3
    generator.close()


def test_an_abandoned_pass_begins_again_with_the_first_layer(tmp_path):
    model = build_decoder(layers=6)
    expected = Generator(model).generate(PROMPTS, sampling=SAMPLING)
    generator = with_layers(packed_model(model, folder=tmp_path / "packed"), resident=1, folder=tmp_path)
    for count in (1, 2, 5):
        for place, _ in enumerate(generator._model.weights.layers):
            if place == count:
                break
        assert values(generator.generate(PROMPTS, sampling=SAMPLING)) == values(expected)
    generator.close()


def test_a_failed_read_is_raised_once_and_read_again(tmp_path, monkeypatch):
    model = build_decoder(layers=6)
    expected = Generator(model).generate(PROMPTS, sampling=SAMPLING)
    generator = with_layers(packed_model(model, folder=tmp_path / "packed"), resident=0, folder=tmp_path)
    disk = generator._streamed._disk

    def broken(buffer, *, offset):
        raise OSError(5, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_some", broken)
        with pytest.raises(DiskError, match=r"layers\.bin failed: planted \(EIO\)"):
            generator.generate(PROMPTS, sampling=SAMPLING)
    assert values(generator.generate(PROMPTS, sampling=SAMPLING)) == values(expected)
    generator.close()


def test_memory_does_not_follow_the_model(tmp_path):
    """Four times the layers in the same memory: the ring has the same bytes, and a pass reads four times as many."""
    plans, held = [], []
    for layers in (6, 24):
        packed = packed_model(build_decoder(layers=layers), folder=tmp_path / str(layers), weights="int8")
        generator = with_layers(packed, resident=0, folder=tmp_path)
        generator.generate(PROMPTS, sampling=SAMPLING)
        plans.append(generator.plan)
        held.append(generator._streamed.memory_bytes)
        generator.close()
    assert held[0] == held[1] and plans[1].pass_bytes == 4 * plans[0].pass_bytes


class Counted(Mapping):
    """Parameters that are made when they are asked for; `most` of their bytes were alive at one time."""

    def __init__(self, state):
        self._state, self._alive, self.most = state, [], 0

    def __getitem__(self, name):
        found = self._state[name].detach().clone()
        self._alive = [one for one in self._alive if one() is not None] + [weakref.ref(found)]
        self.most = max(self.most, sum(one().nbytes for one in self._alive if one() is not None))
        return found

    def __iter__(self):
        return iter(self._state)

    def __len__(self):
        return len(self._state)


def test_packing_reads_one_layer_at_a_time(tmp_path):
    gc.disable()  # the number of live objects must not depend on collections
    try:
        model = build_decoder(layers=24, tie_embeddings=True)
        state = Counted(dict(model.named_parameters()))
        pack(tmp_path / "packed", subject=describe(model), state=state, weights="int8")
    finally:
        gc.enable()
    layer = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    assert state.most <= max(layer, model.embedding.weight.nbytes)


def test_a_packed_folder_needs_no_model(tmp_path):
    """Without offload all its layers are in memory."""
    model = build("llama")
    expected = Generator(model, policy=InferencePolicy(weights="int4")).generate(PROMPTS, sampling=SAMPLING)
    packed_model(model, folder=tmp_path / "packed", weights="int4")
    del model
    generator = Generator(open_packed(tmp_path / "packed"), policy=InferencePolicy(weights="int4"))
    assert values(generator.generate(PROMPTS, sampling=SAMPLING)) == values(expected)


def test_a_module_is_packed_into_a_copy_that_leaves_nothing(tmp_path):
    model = build_decoder(layers=4)
    expected = Generator(model).generate(PROMPTS, sampling=SAMPLING)
    torch.manual_seed(0)
    generator = Generator(model, policy=InferencePolicy(offload=offload(tmp_path)))
    drawn = torch.rand(4)
    torch.manual_seed(0)
    assert list(tmp_path.iterdir()) == [] and torch.equal(
        drawn, torch.rand(4)
    )  # the measurement used another generator
    assert values(generator.generate(PROMPTS, sampling=SAMPLING)) == values(expected)
    with pytest.raises(RuntimeError, match="load: the weights are read from a packed folder"):
        generator.load(generator)
    generator.close()


def test_folders_that_do_not_fit_are_refused(tmp_path):
    folder = tmp_path / "packed"
    packed = packed_model(build_decoder(), folder=folder)
    with pytest.raises(ValueError, match="inference.weights=int8: .* was packed with weights=stored; use that"):
        Generator(packed, policy=InferencePolicy(weights="int8"))
    with pytest.raises(ValueError, match="exists already"):
        packed_model(build_decoder(), folder=folder)
    with pytest.raises(ValueError, match="has no packed.json"):
        open_packed(tmp_path)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"layouts": dict.fromkeys(manifest["layouts"], "other")}))
    with pytest.raises(ValueError, match="another kind of processor"):
        open_packed(folder)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with open(folder / LAYERS, "ab") as file:
        file.truncate(packed.layer_bytes)
    with pytest.raises(ValueError, match=f"has {packed.layer_bytes} bytes, not {2 * packed.layer_bytes}"):
        open_packed(folder)


def test_choices_that_do_not_act_are_refused(tmp_path):
    with pytest.raises(ValueError, match="inference.memory_bytes=1 has no effect where nothing is streamed"):
        InferencePolicy(memory_bytes=1)
    with pytest.raises(ValueError, match="offload.parameters=none: use nvme, or cpu for a GPU"):
        InferencePolicy(offload=OffloadPolicy())
    with pytest.raises(ValueError, match="offload=cpu: answers are computed on the CPU"):
        Generator(build_decoder(), policy=InferencePolicy(offload=OffloadPolicy(parameters="cpu")))
    streams = {"kernels": True, "offload": offload(tmp_path), "memory_bytes": 1000}
    with pytest.raises(ValueError, match="inference.cache_tokens=640: with layers that stream"):
        Generator(build_decoder(), policy=InferencePolicy(**streams, cache_tokens=640))
    with pytest.raises(ValueError, match="serve.weights_path with layers that stream"):
        options = {"max_step_tokens": 8, "max_sequences": 1, "max_model_len": 64}
        policy = InferencePolicy(**streams | {"memory_bytes": 2_000_000}, **options)
        Generator(build_decoder(layers=12, hidden_dim=512), policy=policy, open_weights=lambda folder: None)
    assert not [found for found in tmp_path.iterdir() if found.name.startswith("packed-")]
    packed = packed_model(build_decoder(layers=4), folder=tmp_path / "packed")
    with pytest.raises(ValueError, match="inference.memory_bytes=1000: 1 sequence of 256 tokens need"):
        Generator(packed, policy=InferencePolicy(offload=offload(tmp_path), memory_bytes=1000))
    with pytest.raises(ValueError, match="offload=nvme: 2 of the 4 layers have no experts"):
        packed_model(build_decoder(layers=4, experts=4, experts_every=2), folder=tmp_path / "mixed")


SIZES = Sizes(layers=10, layer=100, fixed=50, sequence=5, row=0, logits=0)


def planned(budget, *, link=100.0, pass_seconds=0.1, row_seconds=0.01, sequences=None, serial=0.0):
    rates = Rates(link=link, pass_seconds=pass_seconds, row_seconds=row_seconds, serial=serial)
    return plan_stream(SIZES, rates=rates, budget=budget, positions=8, sequences=sequences, step_tokens=1)


def test_a_plan_trades_resident_layers_for_sequences():
    """Reading dominates: 0.01 s a sequence, 1 s a layer. Memory for a layer serves 20 sequences more."""
    plan = planned(50 + 500)
    best = max(n / max((10 - (500 - 5 * n) // 100 + 3) * 1.0, 0.1 + 0.01 * n) for n in range(1, 41))
    assert plan.memory_bytes <= 550 and plan.tokens_per_second >= 0.98 * best
    assert plan.pass_bytes == (10 - plan.resident) * 100
    assert planned(550, sequences=4).sequences == 4 and planned(550, sequences=4).resident == 1


def test_a_model_that_fits_is_not_streamed():
    plan = planned(50 + 1000 + 5 * 7, sequences=7)
    assert (plan.resident, plan.buffers, plan.pass_bytes, plan.sequences) == (10, 0, 0, 7)
    assert plan.tokens_per_second == pytest.approx(7 / 0.17)
    assert planned(50 + 1000 + 5 * 7, sequences=7, serial=0.5).tokens_per_second == pytest.approx(7 / 0.17)
    plan = planned(50 + 500, sequences=1, serial=0.5)
    assert plan.tokens_per_second == pytest.approx(1 / (plan.read_seconds + 0.5 * 0.11))


def test_nothing_hides_behind_a_layer_that_is_read_into_the_only_buffer():
    plan = planned(50 + 100 + 20 * 5, sequences=20)
    assert plan.buffers == 1 and plan.rates.serial == 0
    assert plan.tokens_per_second == pytest.approx(20 / (plan.read_seconds + plan.compute_seconds))
    assert planned(50 + 200 + 20 * 5, sequences=20).tokens_per_second == pytest.approx(20 / plan.read_seconds)
    # 60 sequences with one buffer or 40 with two: 60 / (10 + 0.7) of 40 / 10, and 60 / (10 + 6.1) of 40 / 10.
    assert planned(50 + 400).buffers == 1 and planned(50 + 400, row_seconds=0.1).buffers > 1


def test_the_page_cache_of_a_control_group_is_free_memory(tmp_path, monkeypatch):
    """A model that was just packed fills the group's limit with pages of its files."""
    limit, files = 64 << 20, 60 << 20
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{files + (1 << 20)}\n")
    (tmp_path / "memory.stat").write_text(f"anon {1 << 20}\ninactive_file {files - 4096}\nactive_file 4096\n")
    monkeypatch.setattr("ztk.core.runtime.system_memory.CONTROL_GROUP", tmp_path)
    assert free_memory() == int(0.8 * (63 << 20))


def test_more_layers_are_read_than_the_ring_has():
    for budget in range(160, 1050, 10):
        plan = planned(budget, sequences=2)
        assert plan.memory_bytes <= budget and (plan.resident == 10 or 10 - plan.resident > plan.buffers >= 1)
