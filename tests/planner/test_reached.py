"""Rates that operations reach, other libraries' ways of running, and the utilization of a plan."""

from dataclasses import replace

import pytest
import torch

from tests.planner.test_fits import HARDWARE, work
from tests.planner.test_plan import CPU
from ztk.config import ConfigError, compose
from ztk.core.policies.peers import Peer, Way
from ztk.core.precision.float8 import scaled_product
from ztk.experiments.plan import make_plan
from ztk.planner.lanes import Lanes
from ztk.planner.tracker import StepTracker

TILED = replace(HARDWARE, multiprocessors=4, product_share=0.5, bf16_rate=2e9)


def seconds(hardware, *, peer: Peer | None = None, **amounts) -> float:
    lanes = Lanes(hardware, peer=peer)
    work(lanes, **amounts)
    return lanes.now


def test_tiles_that_do_not_fill_a_wave_take_as_long_as_those_that_do():
    full = seconds(TILED, flops=2 * 512 * 256 * 4096, shape=(512, 256, 4096))
    assert full == pytest.approx(2 * 512 * 256 * 4096 / 1e9 * (4096 + 128) / 4096)
    over = seconds(TILED, flops=2 * 520 * 256 * 4096, shape=(520, 256, 4096))
    assert over > 1.4 * full
    assert seconds(TILED, flops=1_000_000, shape=(512, 256, 16)) > 4 * seconds(
        TILED, flops=1_000_000, shape=(512, 256, 4096)
    )


def test_attention_reaches_less_with_short_sequences():
    hardware = replace(HARDWARE, attention_share=0.25, attention_length=400)
    long, short = (
        seconds(hardware, kind="attention", flops=1_000_000_000, shape=(length, 128)) for length in (40_000, 400)
    )
    assert long == pytest.approx(0.5 / 0.25 * 40_400 / 40_000) and short == pytest.approx(0.5 / 0.25 * 2)


def test_peers_multiply_in_fp8():
    hardware = replace(HARDWARE, fp8_rate=2e9)
    assert seconds(hardware, peer=Peer(fp8=True), flops=2_000_000_000, shape=(64, 64, 64)) == pytest.approx(1.0)
    assert seconds(hardware, peer=Peer(fp8=True), flops=2_000_000_000, shape=(64, 50_000, 64_000)) == pytest.approx(
        2.0
    )  # the head
    assert seconds(hardware, peer=Peer(again=0.5), flops=6_000_000_000) == pytest.approx(7.0)


def test_a_collective_delays_concurrent_computing():
    lanes = Lanes(replace(HARDWARE, overlap_cost=0.5, link_share=0.5, link_latency=0.0, network_latency=0.0))
    lanes.collective(size=2, in_node=2)("all_gather", 100_000_000)
    assert lanes.now == pytest.approx(0.5)  # of a second on the wire
    lanes.collective(size=2, in_node=1)("all_gather", 100_000_000)
    assert lanes.now == pytest.approx(1.0)  # the same bytes for longer, over fewer channels


def test_collectives_between_nodes_do_not_delay_collectives_inside_a_node():
    lanes = Lanes(replace(HARDWARE, link_latency=0.0, network_latency=0.0))
    between = lanes.collective(size=2, in_node=1)("all_gather", 100_000_000)
    lanes.collective(size=2, in_node=2)("all_gather", 100_000_000).wait()
    assert lanes.now == pytest.approx(0.5)
    between.wait()
    assert lanes.now == pytest.approx(5.0)
    assert lanes.read(disk_read=0, disk_write=0).busy["wire"] == pytest.approx(5.0)


def test_peers_gather_in_fp8():
    peer = Peer(fp8=True, fp8_gathers=True)
    for kind, seconds in (("all_gather", 0.25), ("reduce_scatter", 0.5)):
        lanes = Lanes(replace(HARDWARE, link_latency=0.0), peer=peer)
        lanes.collective(size=2, in_node=2)(kind, 100_000_000).wait()
        assert lanes.now == pytest.approx(seconds)


def test_a_product_takes_the_rate_of_its_operands():
    """Sums may be kept in fp32, for example the gradient of a head."""
    lanes = Lanes(HARDWARE)
    x, weight = (torch.empty(64, 64, device="meta", dtype=torch.bfloat16) for _ in range(2))
    with StepTracker(device="meta", computed=lanes.compute):
        torch.ops.aten.mm.dtype(x, weight, torch.float32)
    assert lanes.now == pytest.approx(2 * 64**3 / HARDWARE.bf16_rate)


def test_precision_fp8_is_planned_through_the_run_itself(tmp_path):
    hardware = replace(HARDWARE, fp8_rate=2e9, fp8_share=0.5)
    lanes = Lanes(hardware)
    codes = torch.empty(64, 64, device="meta", dtype=torch.float8_e4m3fn)
    with StepTracker(device="meta", computed=lanes.compute):
        scaled_product(codes, b=codes, scales=(torch.empty(64, 1, device="meta"), torch.empty(64, 1, device="meta")))
    assert lanes.now == pytest.approx(2 * 64**3 / 1e9)

    words = ("task=plan", "model=nano", "data=synthetic", "data.seq_len=64", "launch.ranks=2", "zero=stage3")
    wide, short = (
        make_plan(compose(*words, "hardware=h100", f"precision={name}", output_dir=tmp_path, machine=CPU)).as_dict()
        for name in ("bf16", "fp8")
    )
    gathered = "comm.data.all_gather_bytes"
    inside = 2 * 2 * 2 * (2 * 96 * 96 + 2 * 48 * 96 + 3 * 256 * 96)  # forward and backward, bytes, blocks
    assert short["flops"] == wide["flops"]
    assert wide[gathered] - short[gathered] == pytest.approx(inside / 2, rel=0.1)
    with pytest.raises(ValueError, match="precision.float8=rowwise: hardware=a100_80 has no float8 products"):
        make_plan(compose(*words, "hardware=a100_80", "precision=fp8", output_dir=tmp_path, machine=CPU))


def test_utilization_counts_model_and_hardware_flops(tmp_path):
    words = ("task=plan", "hardware=h100", "model=nano", "data=synthetic", "data.seq_len=64", "launch.ranks=2")
    plan, again = (
        make_plan(compose(*words, *more, output_dir=tmp_path, machine=CPU)) for more in ((), ("recompute=full",))
    )
    config = compose(*words, output_dir=tmp_path, machine=CPU)
    tokens = config.train.global_batch_size * 64
    values = plan.as_dict()
    assert values["tokens_per_second_per_gpu"] == pytest.approx(tokens / 2 / plan.time.seconds)
    assert values["mfu"] == pytest.approx(plan.model_flops / 2 / plan.time.seconds / plan.hardware.rate(plan.dtype))
    assert plan.hfu / plan.mfu < 1.05 < again.hfu / again.mfu
    assert f"MFU {plan.mfu:.1%}" in str(plan) and f"per step of {plan.tokens:,} tokens" in str(plan)


def test_a_peers_way_is_for_plans_with_hardware(tmp_path):
    with pytest.raises(ConfigError) as caught:
        compose("task=plan", "plan.way=eager", output_dir=tmp_path, machine=CPU)
    assert "plan.way=eager has no effect here, only with task=plan and hardware=NAME" in caught.value.faults[0]


def test_the_vendors_library_reaches_more_and_hides_collectives_inside_a_node():
    tuned, hardware = Peer(way=Way.tuned), replace(HARDWARE, attention_share=0.25)
    products, attention = {"flops": 2 * 512 * 256 * 4096, "shape": (512, 256, 4096)}, {"shape": (4096, 128)}
    assert seconds(TILED, peer=tuned, **products) == pytest.approx(seconds(TILED, **products) / tuned.product_gain)
    slow, fast = (seconds(hardware, peer=peer, kind="attention", flops=10**9, **attention) for peer in (None, tuned))
    assert fast == pytest.approx(slow / tuned.attention_gain)
    eight = 10**6 * 7 / 8 / HARDWARE.link_bandwidth
    assert Peer(way=Way.eager).hidden < Peer(way=Way.flash).hidden < tuned.hidden
    for kind, part in (("all_gather", 1 - tuned.hidden), ("all_to_all", 1.0)):
        lanes = Lanes(replace(HARDWARE, link_latency=0.0), peer=tuned)
        lanes.collective(size=8, in_node=8)(kind, 10**6).wait()
        assert lanes.now == pytest.approx(part * eight)
