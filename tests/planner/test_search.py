"""The search over layouts: layouts that arithmetic may drop, planned layouts, and complete counts."""

import csv
import json
from dataclasses import replace

import pytest

from tests.parallel.topology.families import make
from tests.planner.test_plan import CPU, FAST_LINKS, small_plan
from ztk.config import ConfigError, compose
from ztk.core.policies.plan import rank_counts
from ztk.experiments import layouts as program
from ztk.experiments.plan import main, make_plan
from ztk.hf.counts import count_model
from ztk.nn import DecoderConfig
from ztk.planner import Layout, Plan, Workload, search
from ztk.planner.layouts import legal, rough_bytes, state_bytes
from ztk.planner.rough import rough_seconds

HARDWARE = replace(FAST_LINKS, link_bandwidth=1e9, capacity_bytes=10_000)
WORK = Workload(
    ranks=4,
    hardware=HARDWARE,
    parameters=1000,
    expert_parameters=0,
    expert_choices=0,
    experts=0,
    layers=4,
    dim=8,
    heads=4,
    kv_heads=2,
    vocabulary=16,
    flops=6000,
    seq_len=8,
    micro_batch=1,
    global_batch=4,
    parameter_bytes=4,
    gradient_bytes=4,
    accumulated_bytes=4,
    optimizer_bytes=8,
    dtype="float32",
    linear_dtype="float32",
)
USUAL = Layout(stage=0, offload="none", recompute="none", pipeline=1, tensor=1, sequence=1, context=1, expert=1)
NANO = ("task=plan", "model=nano", "data=synthetic", "data.seq_len=64", "launch.ranks=4", "hardware=h100")


def planner(fits, *, refused=()):
    """Plans with given results: the overrides in `fits` fit; the seconds are the number of overrides."""
    usual, asked = small_plan(hardware=HARDWARE), []

    def replan(overrides: tuple[str, ...]) -> Plan | str:
        asked.append(overrides)
        if any(word in overrides for word in refused):
            return "not like this"
        trace = usual.classes[0]
        time = replace(trace.time, seconds=float(len(overrides)))
        capacity = 10**9 if fits(overrides) else 1
        return replace(usual, classes=(replace(trace, time=time),), hardware=replace(HARDWARE, capacity_bytes=capacity))

    return replan, asked


def test_layouts_are_all_combinations_and_each_is_legal_or_has_a_reason():
    found, refused = legal(WORK)
    splits = 15  # (pipeline, tensor, sequence, context) whose product divides 4
    assert len(found) + sum(refused.values()) == splits * 4 * 6 * 3
    assert refused["more tensor ranks than key heads"] == 72  # tensor=4
    assert refused["the same as stage 0: one data-parallel rank"] == 2 * 18  # pipeline=4, or pipeline=2 and tensor=2
    assert all(layout.stage != 1 for layout in found if layout.pipeline * layout.tensor == 4)
    assert len(set(found)) == len(found) and USUAL in found
    experts = replace(WORK, experts=2, expert_parameters=500, expert_choices=4)
    assert {layout.expert for layout in legal(experts)[0]} == {1, 2}
    assert legal(replace(experts, seq_len=9))[1]["padding of a ring would be routed to experts"] > 0
    assert (
        "the global batch is no multiple of a micro-batch on every replica" in legal(replace(WORK, global_batch=2))[1]
    )


def test_the_state_of_a_layout_is_never_estimated_too_high(tmp_path):
    """Otherwise arithmetic would drop layouts that fit."""
    config = compose(*NANO, output_dir=tmp_path, machine=CPU)
    work = program.workload(config)
    chosen = [
        USUAL,
        replace(USUAL, stage=3, offload="cpu"),
        replace(USUAL, stage=1, offload="cpu", fraction=0.25),
        replace(USUAL, stage=1, pipeline=2),
        replace(USUAL, stage=2, tensor=2, context=2),
    ]
    for layout in chosen:
        words = program.searched(config, given=dict(word.split("=") for word in NANO), overrides=layout.overrides)
        peak = make_plan(compose(*words, output_dir=tmp_path, machine=CPU)).fullest.peak
        assert state_bytes(layout, work=work) <= peak.nbytes
    assert state_bytes(replace(USUAL, stage=1), work=work) < 0.7 * state_bytes(USUAL, work=work)


def test_more_work_takes_longer():
    usual = rough_seconds(USUAL, work=WORK)
    assert rough_seconds(replace(USUAL, recompute="full"), work=WORK) > usual
    slow_disk = replace(WORK, hardware=replace(HARDWARE, disk_read_bandwidth=1e6))
    host, disk = (rough_seconds(replace(USUAL, offload=tier), work=slow_disk) for tier in ("cpu", "nvme"))
    assert disk > host
    several = replace(WORK, global_batch=16, hardware=replace(HARDWARE, link_bandwidth=1e6))
    ring = replace(USUAL, context=2)
    assert rough_seconds(ring, work=several) > rough_seconds(ring, work=replace(several, kv_heads=1))
    assert rough_seconds(replace(USUAL, stage=3), work=several) > rough_seconds(replace(USUAL, stage=1), work=several)


@pytest.mark.parametrize(("misfits", "count"), [(5, 12), (1000, 0)])
def test_dropped_and_planned_layouts_are_all_layouts(misfits, count):
    """Plans are made until 12 fit, at most 24."""
    places = iter(range(1000))
    replan, asked = planner(lambda overrides: next(places) >= misfits, refused=("topology.context=2",))
    lines = []
    result = search(replan, work=WORK, traced=12, say=lines.append)
    assert len(result.found) + sum(result.dropped.values()) == result.layouts
    rows = result.rows()
    fitting = [row for row in rows if row["fits"]]
    planned, without_offload = len(result.found), len(asked) - len(lines)  # the best layout, if it offloads
    assert (len(fitting), planned) == (count + without_offload, min(12 + misfits, 24) + without_offload)
    assert len(lines) > planned and without_offload <= (count > 0)
    assert result.dropped["refused: not like this"] == len(asked) - planned
    assert result.dropped[f"slower by arithmetic than the {planned} that were planned"] > 0
    assert rows[: len(fitting)] == fitting and [row["rank"] for row in fitting] == list(range(1, len(fitting) + 1))
    assert [row["step_seconds"] for row in fitting] == sorted(row["step_seconds"] for row in fitting)
    assert f"{result.layouts:,} layouts, {planned} planned" in "\n".join(result.lines())


def test_a_search_recommends_no_offload_where_all_fits_without(tmp_path):
    """The update in main memory takes a tenth of a step, and gains nothing."""
    words = (
        "task=plan",
        "hardware=h100",
        "model=7b",
        "model.layers=4",
        "launch.ranks=8",
        "data=synthetic",
        "data.seq_len=4096",
    )
    words += ("train.micro_batch_size=1", "train.global_batch_size=16", "zero=stage3", "recompute=full")
    config = compose(*words, output_dir=tmp_path, machine=CPU)
    work, given = program.workload(config), dict(word.split("=") for word in words)
    for stage in (1, 3):
        kept, offloaded = (replace(USUAL, stage=stage, offload=tier) for tier in ("none", "cpu"))
        assert rough_seconds(kept, work=work) < rough_seconds(offloaded, work=work)
        kept, offloaded = (
            make_plan(
                compose(
                    *program.searched(config, given=given, overrides=one.overrides), output_dir=tmp_path, machine=CPU
                )
            )
            for one in (kept, offloaded)
        )
        assert kept.time.seconds < offloaded.time.seconds


@pytest.mark.parametrize("model, offloaded", [("7b", False), ("70b", True)])
def test_eight_h100_offload_a_model_only_if_its_state_does_not_fit(model, offloaded, tmp_path):
    """The order in which arithmetic chooses layouts, without their plans: 7 billion parameters fit on 8 H100, 70 billion do not."""
    words = ("task=plan", "hardware=h100", f"model={model}", "launch.ranks=8", "data=synthetic", "data.seq_len=4096")
    words += ("train.micro_batch_size=1", "train.global_batch_size=64")
    work = program.workload(compose(*words, output_dir=tmp_path, machine=CPU))
    replan, asked = planner(lambda overrides: "offload=cpu" in overrides or not offloaded)
    result = search(replan, work=work, traced=4, say=lambda line: None)
    assert ["offload=cpu" in overrides for overrides in asked[:4]] == [offloaded] * 4
    assert len(asked) == 4 + offloaded  # the best layout is also planned without offload
    assert (result.found[0].kept is not None) == (result.resident > result.usable) == offloaded
    assert ("no layout without offload fits" in "\n".join(result.lines())) == offloaded


def test_a_search_shows_the_cost_of_offload_if_nothing_fits_without():
    replan, _ = planner(lambda overrides: "offload=cpu" in overrides)

    def priced(overrides: tuple[str, ...]) -> Plan | str:
        plan = replan(overrides)
        trace = plan.classes[0]
        time = replace(
            trace.time, seconds=5.0 + len(overrides), busy={"compute": 4.0}, waiting=1.0, waits={"host": 1.0}
        )
        return replace(plan, classes=(replace(trace, time=time),))

    small = replace(
        WORK, hardware=replace(HARDWARE, capacity_bytes=3_500)
    )  # 4,000 of state remain on a device at stage 3
    result = search(priced, work=small, traced=8, say=lambda line: None)
    text = "\n".join(result.lines())
    assert result.resident == 4_000 and result.found[0].layout.offload == "cpu"
    assert "no layout without offload fits: its state takes at least 4 kB of a device that has 3.5 kB" in text
    seconds = result.found[0].seconds
    assert f"offload=cpu costs 1 s of the {seconds:g} s of a step (host 1 s)" in text
    assert "without offload this layout does not fit: " in text  # one override less, so one second less
    assert f"; a step would take {seconds - 1:g} s, and takes {1 / (seconds - 1):.1%} longer with it" in text
    rows = result.rows()
    assert rows[0]["slower_because"] == "" and rows[0]["offload_seconds"] == 1.0
    assert "the second takes " in text and all(row["slower_because"] for row in rows[1:] if row["fits"])


@pytest.mark.parametrize("fits", [True, False])
def test_parts_of_the_states_are_offloaded_only_after_all_of_them_fit(fits):
    small = replace(WORK, hardware=replace(HARDWARE, capacity_bytes=3_900))  # no layout without offload fits
    replan, asked = planner(lambda overrides: fits and "offload=" in " ".join(overrides))
    result = search(replan, work=small, traced=1000, say=lambda line: None)
    parts = {words: words[:2] + words[3:] for words in asked if any("fraction" in word for word in words)}
    assert bool(parts) == fits
    assert all(asked.index(full) < asked.index(part) for part, full in parts.items())
    assert any(reason.startswith("offload a part of the states") for reason in result.dropped) != fits
    assert len(result.found) + sum(result.dropped.values()) == result.layouts


def test_a_layout_without_offload_that_only_seems_too_large_is_found():
    """The rough size of activations may be too large; the best layout is then planned without its offload, and fits."""
    small = replace(WORK, hardware=replace(HARDWARE, capacity_bytes=4_100))  # 4,000 of state and some activations
    replan, asked = planner(lambda overrides: True)
    result = search(replan, work=small, traced=1, say=lambda line: None)
    assert "offload=cpu" in asked[0] and len(asked) == len(result.found) == 2
    assert result.found[0].layout.offload == "none"
    assert len(result.found) + sum(result.dropped.values()) == result.layouts


def test_the_rough_size_of_70_billion_parameters_is_near_the_planned_peak(tmp_path):
    words = ("task=plan", "hardware=h100", "model=70b", "launch.ranks=8", "data=synthetic", "data.seq_len=4096")
    words += ("train.micro_batch_size=1", "train.global_batch_size=64")
    work = program.workload(compose(*words, output_dir=tmp_path, machine=CPU))
    part = replace(USUAL, stage=3, offload="cpu", fraction=0.75)
    peaks = {  # GB, of plans
        replace(part, context=2): 89.9,
        replace(part, sequence=2): 92.5,
        replace(part, fraction=0.5, recompute="selective", context=2): 109.6,
        replace(part, recompute="selective"): 111.0,
        replace(part, recompute="selective", fraction=1.0): 75.6,
        replace(part, stage=1, tensor=4, fraction=1.0): 142.5,
    }
    for layout, peak in peaks.items():
        assert rough_bytes(layout, work=work) == pytest.approx(peak * 1e9, rel=0.05)


def test_rough_seconds_order_layouts_as_their_plans(tmp_path):
    """70 billion parameters on 8 H100. context=2 has twice the micro-batches, and at stage 3 twice the traffic of ZeRO; a pipeline whose
    stages are too large to stay gathered has more micro-batches, too."""
    words = ("task=plan", "hardware=h100", "model=70b", "launch.ranks=8", "data=synthetic", "data.seq_len=4096")
    words += ("train.micro_batch_size=1", "train.global_batch_size=64")
    work = program.workload(compose(*words, output_dir=tmp_path, machine=CPU))
    usual = replace(USUAL, stage=3, offload="cpu")
    planned = {
        replace(usual, recompute="selective"): 45.3,
        replace(usual, recompute="full"): 51.5,
        replace(usual, context=2): 53.0,
        replace(usual, sequence=2): 54.4,
    }
    rough = [rough_seconds(layout, work=work) for layout in planned]
    assert rough[0] < min(rough[1:])
    assert rough == pytest.approx(list(planned.values()), rel=0.2)
    slow = replace(usual, recompute="selective", pipeline=2)  # 59.2 s
    assert rough_seconds(slow, work=work) > rough[0]


def test_the_rough_order_of_7_billion_parameters_is_that_of_their_plans(tmp_path):
    """On 8 H100. Each micro-batch adds its gradients in all layouts; a stage with the head is slower than the others."""
    words = ("task=plan", "hardware=h100", "model=7b", "launch.ranks=8", "data=synthetic", "data.seq_len=4096")
    words += ("train.micro_batch_size=1", "train.global_batch_size=64")
    work = program.workload(compose(*words, output_dir=tmp_path, machine=CPU))
    planned = {  # seconds, of plans
        replace(USUAL, stage=1): 3.268,
        replace(USUAL, stage=1, recompute="selective"): 3.326,
        replace(USUAL, stage=1, pipeline=2): 3.497,
        replace(USUAL, stage=2): 3.509,
        replace(USUAL, stage=1, tensor=2): 3.751,
        replace(USUAL, stage=0, pipeline=8): 3.901,
        replace(USUAL, stage=2, pipeline=4, tensor=2): 4.395,
    }
    rough = {layout: rough_seconds(layout, work=work) for layout in planned}
    best = sorted(planned, key=planned.__getitem__)[:4]
    assert sorted(rough, key=rough.__getitem__)[:4] == best
    assert [rough[layout] for layout in planned] == pytest.approx(list(planned.values()), rel=0.1)


@pytest.mark.slow
def test_the_first_three_layouts_are_the_best_of_a_full_trace(tmp_path):
    """All layouts of a model with 4 blocks on two ranks, without offload and recomputation. The fourth and the fifth of the trace differ by
    0.2 %, which rough seconds cannot tell apart."""
    words = ("task=plan", "hardware=h100", "model=7b", "model.layers=4", "launch.ranks=2", "data=synthetic")
    words += ("data.seq_len=4096", "train.micro_batch_size=1", "train.global_batch_size=16")
    config = compose(*words, output_dir=tmp_path, machine=CPU)
    work, given = program.workload(config), dict(word.split("=") for word in words)
    grid = [layout for layout in legal(work)[0] if layout.offload == layout.recompute == "none"]

    def seconds(layout: Layout) -> float:
        chosen = program.searched(config, given=given, overrides=layout.overrides)
        return make_plan(compose(*chosen, output_dir=tmp_path, machine=CPU)).time.seconds

    planned = {layout: seconds(layout) for layout in grid}
    rough = {layout: rough_seconds(layout, work=work) for layout in grid}
    best = sorted(grid, key=planned.__getitem__)[:3]
    assert sorted(grid, key=rough.__getitem__)[:3] == best
    assert [rough[layout] for layout in best] == pytest.approx([planned[layout] for layout in best], rel=0.01)


def test_linear_layers_in_fp8_are_ranked_at_its_rate(tmp_path):
    words = ("task=plan", "hardware=h100", "model=7b", "launch.ranks=8", "data=synthetic", "data.seq_len=2048")
    halves, eights = (
        program.workload(compose(*words, f"precision={name}", output_dir=tmp_path, machine=CPU))
        for name in ("bf16", "fp8")
    )
    gain = rough_seconds(USUAL, work=halves) / rough_seconds(USUAL, work=eights)
    assert 1.4 < gain < 1.8  # 1.76 of linear layers; attention stays in bf16


def test_too_much_state_is_never_planned():
    small = replace(WORK, hardware=replace(HARDWARE, capacity_bytes=7_000, host_capacity_bytes=5_000))
    replan, asked = planner(lambda overrides: True)
    result = search(replan, work=small, traced=1000, say=lambda line: None)
    assert result.dropped["the state alone is more than a device has"] > 0  # 16,000 at stage 0
    assert ("zero=stage0",) not in asked and ("zero=stage3",) in asked
    assert result.dropped["the states in main memory alone are more than a node has"] > 0  # 8,000 of all four ranks
    assert not any("offload=cpu" in words and "offload.optimizer_fraction" not in " ".join(words) for words in asked)
    assert len(result.found) + sum(result.dropped.values()) == result.layouts


def test_layouts_that_a_node_has_no_main_memory_for_are_ranked_last_with_the_missing_bytes():
    """Their parts are planned, which take less of it; a full offload that fits on a device prunes nothing."""
    replan, _ = planner(lambda overrides: True)
    needy = replace(WORK, hardware=replace(HARDWARE, capacity_bytes=3_900, host_capacity_bytes=10**6))

    def lacking(overrides: tuple[str, ...]) -> Plan | str:
        plan = replan(overrides)
        trace = plan.classes[0]
        kept = 600_000 if "offload=cpu" in overrides and len(overrides) == 2 else 1000
        trace = replace(trace, reserved=trace.reserved | {"host": kept})
        return replace(plan, classes=(trace,), hardware=replace(plan.hardware, host_capacity_bytes=10**6))

    result = search(lacking, work=needy, traced=1000, say=lambda line: None)
    last = result.rows()[-1]
    assert last["fits"] is False and last["rank"] is None and last["margin_bytes"] > 0
    ranks = result.found[-1].plan.node_ranks
    assert last["node_memory.host_bytes"] == ranks * 600_000
    assert last["host_margin_bytes"] == 10**6 - ranks * 600_000 < 0
    assert f"(a node's main memory lacks {ranks * 600 - 1000} kB)" in "\n".join(result.lines())
    assert any(row["offload"] == "cpu" and row["fits"] for row in result.rows())


def test_what_keeps_more_than_a_misfit_is_not_planned():
    strong = replace(USUAL, recompute="full", offload="cpu")
    assert replace(strong, fraction=0.5).keeps_more(strong) and not strong.keeps_more(replace(strong, fraction=0.5))
    assert USUAL.keeps_more(strong) and replace(USUAL, offload="cpu").keeps_more(strong)
    assert not strong.keeps_more(USUAL) and not replace(USUAL, stage=1).keeps_more(strong)
    replan, asked = planner(lambda overrides: False)
    result = search(replan, work=WORK, traced=1000, say=lambda line: None)
    planned = [found.layout for found in result.found]
    assert len(asked) == len(set(asked)) == len(planned)
    later = [(one, other) for number, one in enumerate(planned) for other in planned[:number]]
    assert not any(one.keeps_more(other) for one, other in later)
    assert "none of them fits" in "\n".join(result.lines())


def test_the_program_ranks_and_writes(tmp_path, capsys):
    words = (*NANO, "topology=tp2", "train.accumulation_steps=4", "plan.search=true", "plan.traced=2")
    (tmp_path / "overrides.json").write_text(json.dumps(dict(word.split("=") for word in words)))
    main(compose(*words, output_dir=tmp_path, machine=CPU))
    written = json.loads((tmp_path / "search.json").read_text())
    assert len(written["found"]) == 2 and written["layouts"] == 2 + sum(written["dropped"].values())
    with open(tmp_path / "search.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["overrides"] for row in rows] == [row["overrides"] for row in written["found"]]
    assert "search: " in capsys.readouterr().out
    best = program.searched(
        compose(*words, output_dir=tmp_path, machine=CPU),
        given=dict(word.split("=") for word in words),
        overrides=tuple(rows[0]["overrides"].split()),
    )
    config = compose(*best, output_dir=tmp_path, machine=CPU)
    assert make_plan(config).time.seconds == pytest.approx(written["found"][0]["step_seconds"])
    assert (
        config.train.global_batch_size == 2 * config.train.micro_batch_size * 4
    )  # of tp2: two replicas, four micro-batches


@pytest.mark.parametrize(
    "words, fault",
    [
        (
            ("task=plan", "plan.search=true"),
            "plan.search=true ranks layouts by memory and seconds: choose hardware=h100",
        ),
        (("plan.search=true",), "plan.search=true has no effect here"),
        (("task=plan", "plan.traced=3"), "plan.traced=3 has no effect here"),
        ((*NANO, "plan.search=true", "plan.traced=0"), "plan.traced=0: must be 1 or more"),
    ],
)
def test_a_search_is_for_plans_with_hardware(words, fault, tmp_path):
    with pytest.raises(ConfigError) as caught:
        compose(*words, output_dir=tmp_path, machine=CPU)
    assert any(line.startswith(fault) for line in caught.value.faults)


def test_a_model_of_transformers_is_counted_as_the_decoder_is():
    """A Llama has the decoder's products; of experts a token uses some."""
    decoder = DecoderConfig(vocab_size=300, dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=64, max_seq_len=64)
    llama = make("Llama", vocab_size=300, hidden_size=32, num_hidden_layers=2, intermediate_size=64)
    counts = count_model(llama, seq_len=64, experts=0)
    assert counts.parameters == counts.trained == decoder.parameter_count()
    assert counts.flops == decoder.flops_per_token(64)
    sparse = make("Qwen2Moe", vocab_size=300)
    usual, one = (count_model(sparse, seq_len=64, experts=experts) for experts in (4, 0))
    layers, per_token = sparse.config.num_hidden_layers, sparse.config.num_experts_per_tok
    assert usual.expert_choices == layers * per_token and one.expert_choices == 0
    assert usual.expert_parameters == layers * sum(p.numel() for p in sparse.model.layers[0].mlp.experts.parameters())
    assert one.flops - usual.flops == 6 * usual.expert_parameters * (4 - per_token) // 4


def test_layouts_of_a_model_of_transformers_are_ranked(tmp_path):
    make("Qwen2Moe", vocab_size=300, max_position_embeddings=128).save_pretrained(tmp_path / "model")
    words = ("task=plan", "model=hf", f"model.path={tmp_path / 'model'}", *NANO[2:], "lora=adapter", "plan.search=true")
    config = compose(*words, output_dir=tmp_path, machine=CPU)
    given = dict(word.split("=") for word in words)
    work = program.workload(config)
    assert 0 < work.gradient_bytes < 0.5 * work.parameter_bytes  # adapters alone
    found = program.find_layouts(replace(config, plan=replace(config.plan, traced=4)), given=given, make_plan=make_plan)
    assert len(found.found) == 4 and all(one.plan.fits for one in found.found)
    for one in found.found:
        assert state_bytes(one.layout, work=work) <= one.plan.fullest.peak.nbytes


def test_the_cheapest_of_several_numbers_of_ranks_comes_first(tmp_path, capsys):
    words = (*NANO[:-2], "hardware=h100", "plan.search=true", "plan.traced=2", "train.global_batch_size=64")
    training = ("plan.ranks=[2,8]", "plan.tokens=1e9", "plan.budget_hours=0.01")
    config = compose(*words, *training, output_dir=str(tmp_path))
    found = program.find_layouts(config, given=dict(word.split("=", 1) for word in words), make_plan=make_plan)
    rows = found.rows()
    assert {row["launch.ranks"] for row in rows} == {2, 8}
    hours = [row["gpu_hours"] for row in rows]
    assert hours == sorted(hours)
    first = rows[0]
    assert first["gpu_hours"] == pytest.approx(1e9 / first["tokens_per_second_per_gpu"] / 3600)
    assert first["days"] == pytest.approx(first["gpu_hours"] / first["launch.ranks"] / 24)
    assert first["within_budget"] == (first["gpu_hours"] <= 0.01)
    text = capsys.readouterr().out
    assert f"1e+09 tokens take {first['gpu_hours']:,.0f} GPU hours" in text
    assert "plan.budget_hours=0 trains" in text
    assert "more GPU time" in text or "longer" in text


@pytest.mark.parametrize(
    ("given", "counts"), [([8, 4], [4, 8]), ("8-64", [8, 16, 32, 64]), (16, [16]), ("3-20", [3, 6, 12]), ("8", [8])]
)
def test_numbers_of_ranks(given, counts):
    assert rank_counts(given) == counts


@pytest.mark.parametrize("given", ["8-4", "many", [0], [], "-8", 2.5, True, [True, 8]])
def test_other_forms_of_plan_ranks_are_refused(given):
    with pytest.raises(ValueError, match=r"plan\.ranks=.*\[8,16,24\]"):
        rank_counts(given)


@pytest.mark.parametrize(
    ("peer", "way"), [("fsdp2", "zero=stage3 plan.way=eager"), ("ddp", "zero=stage0 plan.way=eager")]
)
def test_plans_of_peers_are_refused_with_their_command(peer, way):
    with pytest.raises(ConfigError, match=f"zero={peer}: task=plan .* use {way}"):
        compose(*NANO, f"zero={peer}", output_dir=".")
