"""Whether a plan fits, the changes that make it fit, and the seconds of a step at the hardware's rates."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

import ztk
from tests.planner.test_plan import CPU, small_plan
from ztk.config import ConfigError, compose, conf_dir
from ztk.config.arguments import options_of
from ztk.core.policies.curves import seconds_of
from ztk.experiments import plan as program
from ztk.experiments import policies
from ztk.planner import Plan, fixes
from ztk.planner.lanes import Lanes
from ztk.planner.tracker import StepTracker

# Round numbers: an operation per nanosecond, a byte per nanosecond, and links of a tenth of that.
HARDWARE = ztk.Hardware(
    name="round",
    capacity_bytes=10_000_000,
    reserve_bytes=1_000_000,
    bf16_rate=1e9,
    fp16_rate=1e9,
    fp32_rate=5e8,
    memory_bandwidth=1e9,
    host_bandwidth=1e9,
    pcie_bandwidth=1e9,
    disk_read_bandwidth=1e9,
    disk_write_bandwidth=5e8,
    link_latency=0.5,
    link_bandwidth=1e8,
    network_latency=1.0,
    network_bandwidth=1e7,
    ranks_per_node=8,
)


def work(lanes: Lanes, **amounts) -> None:
    usual = {
        "kind": "product",
        "flops": 0,
        "device_bytes": 0,
        "host_bytes": 0,
        "dtype": torch.bfloat16,
        "copies": False,
    }
    lanes.compute(**usual | amounts)


def test_computing_takes_the_longer_of_operations_and_bytes():
    lanes = Lanes(HARDWARE)
    lanes.restart()
    work(lanes, flops=2_000_000_000, device_bytes=1_000_000_000)
    work(lanes, flops=1_000_000_000, device_bytes=3_000_000_000)
    work(lanes, flops=1_000_000_000, dtype=torch.float32)
    time = lanes.read(disk_read=0, disk_write=0)
    assert time.seconds == pytest.approx(2 + 3 + 2) and time.limit == "compute"


def test_products_of_experts_take_their_measured_rates():
    """torch computes groups of rows by another product than single ones: in bfloat16 a CPU without its instructions takes 15 times as long."""
    curves = {f"{kind}.float32": [[512.0, 1.0]] for kind in ("product", "attention", "elementwise")}
    x, weight = torch.empty(4, 8, device="meta"), torch.empty(2, 8, 8, device="meta")
    ends = torch.empty(2, dtype=torch.int32, device="meta")
    for measured, seconds in (({}, 1.0), ({"grouped_product.float32": [[512.0, 15.0]]}, 15.0)):
        lanes = Lanes(replace(HARDWARE, curves=curves | measured))
        with StepTracker(device="meta", computed=lanes.compute):
            torch.nn.functional.grouped_mm(x, weight, offs=ends)
        assert lanes.now == pytest.approx(seconds)


def test_a_collective_hides_behind_computing_until_somebody_waits():
    lanes = Lanes(HARDWARE)
    lanes.restart()
    moved = lanes.collective(size=2, in_node=2)
    first, second = (
        moved("all_gather", 200_000_000),
        moved("all_gather", 200_000_000),
    )  # 0.5 s + half of it at 1e8 B/s, twice
    work(lanes, flops=1_000_000_000)
    first.wait()
    assert lanes.read(disk_read=0, disk_write=0).waiting == pytest.approx(0.5)
    second.wait()
    time = lanes.read(disk_read=0, disk_write=0)
    assert time.waiting == pytest.approx(2.0) and time.seconds == pytest.approx(3.0) and time.limit == "wire"


def test_between_nodes_every_device_has_its_own_port():
    for in_node, seconds in ((1, 1 + 1e8 * 15 / 16 / 1e7), (4, 1 + 1e8 * 15 / 16 / 4e7)):
        lanes = Lanes(HARDWARE)
        lanes.restart()
        lanes.collective(size=16, in_node=in_node)("all_gather", 100_000_000).wait()
        assert lanes.read(disk_read=0, disk_write=0).seconds == pytest.approx(seconds)


def test_the_busiest_lane_is_a_bound_and_is_named():
    lanes = Lanes(HARDWARE)
    lanes.restart()
    work(lanes, flops=1_000_000_000)
    work(
        lanes, device_bytes=3_000_000, host_bytes=3_000_000, copies=True
    )  # to the host: its memory does no work of its own
    work(lanes, host_bytes=4_000_000)
    time = lanes.read(disk_read=2_000_000_000, disk_write=2_000_000_000)
    assert time.busy == pytest.approx({"compute": 1.0, "wire": 0.0, "pcie": 0.003, "host": 0.004, "disk": 6.0})
    assert time.seconds == pytest.approx(6.0) and time.limit == "disk"
    assert time.parts == pytest.approx({"compute": 1.0, "host": 0.004, "disk": 4.996})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_waits_for_the_update_in_main_memory(stage):
    """The bits of a step do not change, so only the next forward up to a bucket's first use can hide the update of that bucket."""
    slow = {"hardware": replace(HARDWARE, host_bandwidth=1e4), "offload": ztk.OffloadPolicy(optimizer="cpu")}
    fast = slow | {"hardware": replace(HARDWARE, host_bandwidth=1e15)}
    slow, fast = (small_plan(zero=ztk.ZeroPolicy(stage=stage), **choices).time for choices in (slow, fast))
    host = slow.busy["host"]
    assert host > 1 and fast.waits.get("host", 0.0) < 0.01
    assert slow.seconds - fast.seconds > 0.9 * host and slow.waits["host"] > 0.9 * host
    assert sum(slow.parts.values()) == pytest.approx(slow.seconds)


def test_an_update_behind_the_forward_is_waited_for_where_its_parameters_are_used():
    lanes = Lanes(HARDWARE)
    lanes.restart()
    work(lanes, device_bytes=1_000_000_000, host_bytes=1_000_000_000, copies=True, to_host=True)  # a gradient
    with lanes.behind():
        work(lanes, host_bytes=2_000_000_000)
        work(lanes, device_bytes=500_000_000, host_bytes=500_000_000, copies=True)
        moment = lanes.updated()
    assert lanes.now == 0.0 and moment == pytest.approx(1 + 2 + 0.5)
    work(lanes, flops=3_000_000_000)
    lanes.wait_until(moment, lane="host")
    time = lanes.read(disk_read=0, disk_write=0)
    assert time.seconds == pytest.approx(3.5) and time.waits == pytest.approx({"host": 0.5})
    assert time.busy["pcie"] == pytest.approx(1.0)  # the link carries both directions at one time


CURVES = {
    "product.float32": [[1e6, 1.0], [4e6, 2.0]],
    "product.bfloat16": [[1e6, 0.5]],
    "attention.float32": [[1e6, 1.0]],
    "elementwise.float32": [[1e6, 0.25]],
    "all_gather": [[1e6, 3.0]],
}


def test_between_measured_points_seconds_are_a_power_of_the_work():
    points = CURVES["product.float32"]
    assert [seconds_of(points, amount=amount) for amount in (5e5, 1e6, 2e6, 4e6, 8e6)] == pytest.approx(
        [0.5, 1.0, 2**0.5, 2.0, 4.0]
    )
    for points in ([], [[2.0, 1.0], [1.0, 2.0]], [[1.0, 0.0]]):
        with pytest.raises(ValueError, match="hardware.curves: product.float32 needs points"):
            replace(HARDWARE, curves=CURVES | {"product.float32": points})
    with pytest.raises(ValueError, match="attention.float32, elementwise.float32 must be there"):
        replace(HARDWARE, curves={"product.float32": [[1e6, 1.0]]})


def test_on_the_cores_of_a_cpu_all_but_the_disk_takes_turns():
    lanes = Lanes(replace(HARDWARE, curves=CURVES, operation_latency=0.1))
    lanes.restart()
    work(lanes, flops=2_000_000, dtype=torch.float32)  # 0.1 + 1.414
    work(lanes, flops=1_000_000)  # 0.1 + 0.5, in bfloat16
    work(lanes, kind="elementwise", device_bytes=2_000_000)  # 0.1 + 0.5, of the curve of float32
    work(lanes, kind="elementwise", host_bytes=500_000, device_bytes=500_000)  # 0.1 + 0.25
    work(lanes, kind="rope")  # nothing but its start
    sent = lanes.collective(size=2, in_node=2)("all_gather", 1_000_000)
    sent.wait()
    time = lanes.read(disk_read=1_000_000_000, disk_write=0)
    computed = 4 * 0.1 + 2**0.5 + 0.5 + 0.5
    assert time.busy == pytest.approx({"compute": computed, "wire": 3.0, "host": 0.35, "pcie": 0.0, "disk": 1.0})
    assert time.seconds == pytest.approx(computed + 3.35) and time.waiting == 0.0


def test_on_a_cpu_the_host_takes_gradients_requests_and_what_a_mode_intercepts():
    host = {"gradient": [[1.0, 100.0]], "request": [[1.0, 1e4], [1e9, 1e4]], "intercepted.bfloat16": [[1.0, 1e6]]}
    nvme = ztk.OffloadPolicy(optimizer="nvme", nvme_path="none")
    selective = ztk.RecomputePolicy(mode="selective", modules=(r"layers\.\d+",))

    def added(**choices) -> int:
        """Seconds of the host's work, if all other hardware is fast."""
        plans = [
            small_plan(
                hardware=replace(HARDWARE, curves=CURVES | more), precision=ztk.PrecisionPolicy.named("bf16"), **choices
            )
            for more in ({}, host)
        ]
        without, with_host = (plan.time.seconds for plan in plans)
        return round(with_host - without)

    assert added() == added(accumulation_steps=3) // 3 == 2 * 100  # a weight in each of two layers
    requests, rest = divmod(added(offload=nvme) - 200, 10_000)
    assert requests > 0 and rest == 0
    intercepted, rest = divmod(added(recompute=selective) - 200, 1_000_000)
    assert intercepted > 0 and rest == 0


def test_a_tensor_without_values_is_no_work():
    seen = []
    with StepTracker(device="meta", computed=lambda **work: seen.append(work["kind"])):
        x = torch.empty(4, 4, 4, device="meta")
        torch.empty_like(x)
        x.new_empty(3)
        product = x @ torch.empty(4, 4, device="meta")  # of rows, by views of both sides
        product.view(16, 4).t()
    assert seen == ["product"]


def test_a_step_takes_its_operations_and_its_bytes():
    plan = small_plan(hardware=HARDWARE, world_size=1, precision=ztk.PrecisionPolicy.named("bf16"))
    assert plan.time.seconds >= plan.fullest.flops / HARDWARE.bf16_rate > 0
    offloaded = small_plan(
        hardware=HARDWARE, zero=ztk.ZeroPolicy(stage=2), offload=ztk.OffloadPolicy(optimizer="nvme", nvme_path="none")
    )
    trace = offloaded.fullest
    assert trace.time.busy["disk"] == pytest.approx(trace.disk_read / 1e9 + trace.disk_write / 5e8)
    gradients = 2 * 64 * 64 * 4 // 2  # fp32, of half the parameters; the updated ones come back
    assert trace.time.busy["pcie"] >= gradients / 1e9 and trace.time.busy["host"] > 0
    assert small_plan().time is None and small_plan().fits is None


def test_the_margin_is_memory_minus_peak():
    plan = small_plan(hardware=HARDWARE)
    peak = plan.fullest.peak.nbytes
    assert plan.margin_bytes == 9_000_000 - peak and plan.fits and "fits: " in str(plan)
    full = replace(plan, hardware=replace(HARDWARE, capacity_bytes=1_000_000 + peak - 1))
    assert full.margin_bytes == -1 and full.fits is False and "does not fit: 1 B more" in str(full)
    assert replace(full, hardware=replace(HARDWARE, capacity_bytes=1_000_000 + peak)).fits


def test_communicators_beyond_the_reserve_take_memory():
    plan = replace(small_plan(hardware=HARDWARE), hardware=replace(HARDWARE, capacity_bytes=2_000_000_000))
    cut = replace(plan, world_size=32, topology=ztk.Topology(tensor=2, pipeline=4, expert=2))
    assert cut.connections.communicators == 8 and plan.connections.communicators == 1
    assert plan.margin_bytes - cut.margin_bytes == 3 * 300_000_000
    assert "after its reserve and 8 communicators" in str(cut) and "64 calls of new_group on every rank" in str(cut)
    assert cut.as_dict()["start.new_groups"] == 64
    on_cores = replace(cut, hardware=replace(cut.hardware, curves=CURVES))
    assert on_cores.margin_bytes == plan.margin_bytes


def test_the_ranks_of_a_node_share_its_main_memory():
    plan = small_plan(
        hardware=HARDWARE, zero=ztk.ZeroPolicy(stage=2), offload=ztk.OffloadPolicy(optimizer="cpu"), world_size=4
    )
    kept = plan.peak_bytes["host"]
    assert kept > 0 and plan.host_margin_bytes is None and plan.fits and "main memory that a node" not in str(plan)

    def on(node: ztk.Hardware) -> Plan:
        return replace(plan, hardware=node)

    exact = replace(HARDWARE, host_capacity_bytes=4 * kept + 500, host_reserve_bytes=500)
    assert on(exact).node_host_bytes == 4 * kept and on(exact).host_margin_bytes == 0 and on(exact).fits
    assert ", and 0 B of the " in on(exact).answer and "of main memory that a node has after its reserve" in str(
        on(exact)
    )
    full = on(replace(exact, host_reserve_bytes=501))
    assert full.fits is False and full.margin_bytes > 0 and full.missing_bytes == 1
    assert full.as_dict()["host_margin_bytes"] == -1 and full.as_dict()["fits"] is False
    assert "does not fit: 4 ranks of a node take " in str(full) and "of main memory, 1 B more than the " in str(full)
    assert on(replace(exact, ranks_per_node=3)).host_margin_bytes == kept  # the fourth rank is in another node
    both = on(replace(exact, host_reserve_bytes=501, capacity_bytes=1_000_001))
    assert both.missing_bytes == 1 + both.peak_bytes["device"] - 1 and "; 4 ranks of a node" in both.answer
    on_cpu = on(replace(exact, curves=CURVES))  # device memory is main memory, too
    assert on_cpu.node_host_bytes == 4 * (kept + plan.peak_bytes["device"])


def test_the_fewest_changes_come_first_and_then_the_fastest():
    """Replaces plans by results that depend on the overrides, and records every requested plan."""
    usual = small_plan(hardware=HARDWARE)
    asked = []
    seconds = {("b2",): 3.0, ("b1",): 1.0, ("c1", "c2"): 2.0}

    def replan(overrides: tuple[str, ...]) -> Plan | None:
        asked.append(overrides)
        if overrides == ("d1",):
            return None
        trace = usual.classes[0]
        time = replace(trace.time, seconds=seconds.get(overrides, 9.0))
        capacity = 10_000_000 if overrides in seconds else 1_000_001
        return replace(usual, classes=(replace(trace, time=time),), hardware=replace(HARDWARE, capacity_bytes=capacity))

    levers = [[("a1",), ("a2",)], [("b1",), ("b2",)], [("c1", "c2")], [("d1",)]]
    assert [fix.overrides for fix in fixes(replan, levers=levers)] == [("b1",), ("c1", "c2"), ("b2",)]
    assert asked == [("a2",), ("b2",), ("b1",), ("c1", "c2"), ("d1",)]  # ("a1",) saves less than the missing bytes
    asked.clear()
    assert not fixes(lambda overrides: None, levers=levers)
    seconds = {("a2", "d1"): 1.0}
    assert [fix.overrides for fix in fixes(replan, levers=levers)] == [("a2", "d1")]


@pytest.mark.parametrize("name", sorted(set(options_of([conf_dir()])["hardware"]) - {"here"}))
def test_hardware_is_described(name, tmp_path):
    config = compose("task=plan", f"hardware={name}", output_dir=tmp_path, machine=CPU)
    hardware = policies.hardware(config)
    assert hardware.name == name and 38e9 < hardware.usable_bytes < 200e9
    assert hardware.usable_host_bytes == (1 if name == "a100_40" else 2) * 2**40 - 10**11
    assert hardware.fp32_rate < hardware.bf16_rate and hardware.network_bandwidth < hardware.link_bandwidth


@pytest.mark.parametrize(
    "overrides, fault",
    [
        (("hardware=h100",), "hardware=h100 has no effect with task=pretrain: use task=plan"),
        (("task=plan", "hardware.link_latency=1e-5"), "hardware.name has no value: choose hardware=h100"),
        (("task=plan", "hardware=h100", "hardware.bf16_rate=0"), "hardware.bf16_rate=0"),
    ],
)
def test_incomplete_hardware_is_refused(overrides, fault, tmp_path):
    with pytest.raises(ConfigError) as caught:
        compose(*overrides, output_dir=tmp_path, machine=CPU)
    assert any(line.startswith(fault) for line in caught.value.faults)


def test_what_the_program_proposes_fits(tmp_path, capsys):
    given = {
        "task": "plan",
        "model": "nano",
        "data.seq_len": "64",
        "hardware": "h100",
        "hardware.reserve_bytes": "0",
        "launch.ranks": "4",
    }
    planned = program.make_plan(
        compose(*itertools.starmap("{}={}".format, given.items()), output_dir=tmp_path, machine=CPU)
    )
    given["hardware.capacity_bytes"] = str(planned.fullest.peak.nbytes - 1)
    (tmp_path / "overrides.json").write_text(json.dumps(given))
    command = list(itertools.starmap("{}={}".format, given.items()))
    program.main(compose(*command, output_dir=tmp_path, machine=CPU))
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["fits"] is False and written["margin_bytes"] == -1 and written["fixes"]
    assert "it fits with one of these" in capsys.readouterr().out
    values = given | dict(override.split("=") for override in written["fixes"][0].split())
    fixed = compose(*itertools.starmap("{}={}".format, values.items()), output_dir=tmp_path, machine=CPU)
    assert program.make_plan(fixed).fits
    assert fixed.train.micro_batch_size * fixed.train.accumulation_steps == 8  # the batch stays
    offloaded = compose(*command, "zero=stage1", "offload=cpu", output_dir=tmp_path, machine=CPU)
    assert [("offload=nvme",)] in list(program.levers(offloaded, given=given))  # if main memory is too small
