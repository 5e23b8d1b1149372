"""`hardware=here`: the numbers of this machine, measured, written, read and refused."""

import json
import sys
from dataclasses import asdict, fields, replace

import pytest
import torch

import ztk
from tests.planner.test_fits import HARDWARE
from tests.planner.test_plan import CPU, small_plan
from ztk.calibrate import combine, curves, measure, steps, timing
from ztk.calibrate.__main__ import main
from ztk.calibrate.measure import METHODS
from ztk.calibrate.rank import describe
from ztk.config import ConfigError, compose, from_yaml, to_yaml
from ztk.core.policies.hardware import NAMES, read_measured, write_measured
from ztk.experiments import policies

WITHOUT_NETWORK = replace(HARDWARE, name="here", network_latency=None, network_bandwidth=None, source="measured today")
COMMAND = "python -m ztk.calibrate"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ztk" / "hardware.json"


def content() -> dict:
    return {"hardware": {name: value for name, value in asdict(WITHOUT_NETWORK).items() if value is not None}}


def plan_here(tmp_path, *overrides: str):
    return compose("task=plan", "hardware=here", *overrides, output_dir=tmp_path, machine=CPU)


def test_what_was_never_written_is_refused_with_the_command(cache, tmp_path):
    with pytest.raises(ConfigError, match=f"{cache} was never written: run `{COMMAND}`"):
        plan_here(tmp_path)
    with pytest.raises(ConfigError, match=f"run `{COMMAND} --to other.json`"):
        plan_here(tmp_path, "hardware.file=other.json")
    with pytest.raises(ValueError, match=COMMAND):
        ztk.Hardware.here()
    cache.parent.mkdir(parents=True)
    cache.write_text("{}")
    with pytest.raises(ValueError, match="no description of hardware"):
        ztk.Hardware.here()


def test_a_plan_reads_the_written_file(cache, tmp_path):
    assert write_measured(content()) == cache
    assert ztk.Hardware.here() == WITHOUT_NETWORK
    kinds = ("product.float32", "elementwise.float32", "attention.float32")
    curves = {"curves": {kind: [[1e6, 1e-3], [2e6, 1.5e-3]] for kind in kinds}}
    write_measured({"hardware": content()["hardware"] | curves}, file=tmp_path / "cpu.json")
    config = plan_here(tmp_path, f"hardware.file={tmp_path / 'cpu.json'}", "launch.ranks=8")
    assert policies.hardware(from_yaml(to_yaml(config))) == replace(WITHOUT_NETWORK, **curves)
    for words in ("plan.way=eager", "plan.fp8=true", "plan.again=0.5", "plan.logits=eager"):
        with pytest.raises(ConfigError, match=f"{words}: has no effect with hardware.curves"):
            plan_here(tmp_path, f"hardware.file={tmp_path / 'cpu.json'}", words)
    config = plan_here(tmp_path, "hardware.capacity_bytes=5000000", "launch.ranks=8")
    assert policies.hardware(config) == replace(WITHOUT_NETWORK, capacity_bytes=5_000_000)
    write_measured(content() | {"hardware": content()["hardware"] | {"ranks_per_node": 3}}, file=tmp_path / "own.json")
    assert plan_here(tmp_path, f"hardware.file={tmp_path / 'own.json'}").hardware.ranks_per_node == 3
    assert "s or more, at the rates measured today" in str(small_plan(hardware=ztk.Hardware.here()))
    cpu = {
        kind: [[1e6, 1e-3]] for kind in ("product.float32", "elementwise.float32", "attention.float32", "all_gather")
    }
    assert "a step takes about " in str(small_plan(hardware=replace(ztk.Hardware.here(), curves=cpu)))


def test_no_network_was_measured(cache, tmp_path):
    write_measured(content())
    with pytest.raises(ConfigError, match=r"launch.ranks=16.*measured with 8 ranks.*--ranks 16"):
        plan_here(tmp_path, "launch.ranks=16")
    network = ("hardware.network_latency=1e-5", "hardware.network_bandwidth=1e9")
    assert plan_here(tmp_path, "launch.ranks=16", *network).hardware.network_bandwidth == 1e9
    with pytest.raises(ValueError, match="there is no network"):
        small_plan(hardware=WITHOUT_NETWORK, world_size=16)


@pytest.mark.parametrize(
    "overrides, fault",
    [
        (("hardware=here",), "was never written"),
        (("task=plan", "hardware=h100", "hardware.file=x"), "hardware.file=x: is read with hardware=here alone"),
    ],
)
def test_here_is_for_plans(overrides, fault, cache, tmp_path):
    with pytest.raises(ConfigError, match=fault):
        compose(*overrides, output_dir=tmp_path, machine=CPU)


def test_an_operation_takes_at_least_its_latency():
    fast = small_plan(hardware=HARDWARE).time.busy["compute"]
    slow = small_plan(hardware=replace(HARDWARE, operation_latency=1.0)).time.busy["compute"]
    assert slow == int(slow) > fast


def test_ranks_measure_together(ranks, tmp_path):
    found = ranks(2).run(measured, folder=str(tmp_path))
    hardware = combine(found, source="measured today")
    assert all(rank.keys() <= METHODS.keys() for rank in found) and set(METHODS) <= set(NAMES)
    assert hardware.ranks_per_node == 2 and hardware.network_bandwidth is None
    assert hardware.fp32_rate == min(rank["fp32_rate"] for rank in found)
    assert hardware.link_latency == max(rank["link_latency"] for rank in found)
    assert 2 * hardware.capacity_bytes > hardware.reserve_bytes > 5e7  # torch alone is larger
    written = describe(found, device=torch.device("cpu"))
    write_measured(json.loads(json.dumps(written)), file=tmp_path / "here.json")
    read, keys = read_measured(tmp_path / "here.json"), written["sources"].keys() | {"name", "source"}
    usual = {field.name: field.default for field in fields(ztk.Hardware)}
    assert keys <= read.keys()
    assert {key: read[key] for key in read.keys() - keys} == {key: usual[key] for key in read.keys() - keys}
    assert {read[key] for key in read if key.endswith("_share")} <= {1.0}  # measured rates are reached


def measured(process, *, folder: str) -> dict[str, float]:
    """Once each, of two sizes, models of one layer, and little of the disk: the numbers are rough and the code is the same."""
    module = sys.modules["ztk.calibrate.measure"]  # the package has a function of that name

    timing.ROUND_SECONDS, timing.ROUNDS, curves.CALL_SECONDS, module.IO_BYTES = 0.0, 1, 0.0, 64 << 20
    for name in ("SIDES", "LENGTHS", "ROWS", "UPDATED", "ELEMENTS"):
        setattr(curves, name, getattr(curves, name)[:2])
    for name in ("TINY", "USUAL"):
        model = getattr(steps, name)
        setattr(steps, name, replace(model, sizes=model.sizes | {"layers": 1}))
    return measure(process, folder=folder)


def test_arguments_that_do_not_fit_are_refused(capsys):
    assert main(["--ranks", "0"]) == 2
    assert "--ranks 0: must be 1 or more" in capsys.readouterr().err
