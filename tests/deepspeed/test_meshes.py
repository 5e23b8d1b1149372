"""Engines whose ranks hold parts of the model: export and import of full weights, batch sizes, and refusals."""

import gc
import logging
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from ztk.core.runtime import Process
from ztk.deepspeed.pipe import LayerSpec, PipelineModule
from ztk.parallel.moe import MoE

WIDTH, ROWS = 8, 4
CUT = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r"up\.weight$"], "partition_type": "column"},
            {"patterns": [r"down\.weight$"], "partition_type": "row"},
        ],
    },
}


class Layers(nn.Module):
    """Of which tensor parallelism cuts two, with a frozen one, a tied name and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.again = self.norm
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.down(F.relu(self.up(x)))) * self.scale


class Experts(nn.Module):
    def __init__(self, *, ep_size: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=ep_size, drop_tokens=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x))[0]


class Stages(PipelineModule):
    def __init__(self, *, num_stages: int = 2) -> None:
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
        super().__init__(layers, num_stages=num_stages, loss_fn=F.mse_loss, seed_layers=True)


MODELS = {"tp": Layers, "ep": Experts, "pp": Stages}


def config(kind: str, *, stage: int, optimizer: bool = True, **more) -> dict:
    rows = ROWS if kind == "pp" else 2 * ROWS if kind == "ep" else ROWS
    made = {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": 1 if kind == "pp" else ROWS,
        "zero_optimization": {"stage": stage},
        **more,
    }
    if optimizer:
        made["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    if kind == "tp":
        made["tensor_parallel"] = CUT
    return made


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()


def numbered(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other values, all different."""
    generator = torch.Generator().manual_seed(2)
    return {name: torch.rand(value.shape, generator=generator) for name, value in state.items()}


def answer(engine, *, kind: str) -> Tensor:
    x, y = data()
    if kind == "pp":
        rows = [(x[n : n + 1], y[n : n + 1]) for n in range(ROWS)]
        return engine.eval_batch(iter(rows))
    with torch.no_grad():
        return engine(x)


def weights(process: Process, *, kind: str, stage: int, folder: str) -> dict:
    """Export, import, the parts on each rank, and refusals."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    settings = config(kind, stage=stage)
    settings["zero_optimization"] |= zero
    engine = deepspeed.initialize(model=made(kind), config=settings)[0]
    engine.save_16bit_model(folder)
    found = {"first": engine.module_state_dict(), "consolidated": engine._consolidated_16bit_state_dict()}
    found["names"] = [name for name, _ in engine.module.named_parameters()]
    new = numbered(found["first"])
    new |= {name: new[name.replace("again", "norm")] for name in new if "again" in name}
    engine.load_module_state_dict({"module": new})
    found["new"], found["loaded"] = new, engine.module_state_dict()
    found["answer"] = answer(engine, kind=kind)
    one = sorted(name for name in new if name.endswith("weight"))[-1]
    found["refused"] = refusals(engine, new=new, one=one)
    engine.load_module_state_dict({"module": {one: new[one] + 1}}, strict=False)
    found["one"] = (one, engine.module_state_dict()[one])
    engine.destroy()
    return found


def refusals(engine, *, new: dict[str, Tensor], one: str) -> list[str]:
    """Of a state without one name, of one with a part as if it were full, and of a function."""
    texts = []
    for state, custom in (
        ({name: value for name, value in new.items() if name != one}, None),
        (new | {one: new[one][:1]}, None),
        (new, lambda src, dst: None),
    ):
        try:
            engine.load_module_state_dict({"module": state}, custom_load_fn=custom)
        except ValueError as error:
            texts.append(str(error))
    return texts


def plain(kind: str, *, state: dict[str, Tensor]) -> Tensor:
    """The model's answer on one rank."""
    x, y = data()
    if kind == "pp":
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        model.load_state_dict(state)
        return F.mse_loss(model(x[:ROWS]), y[:ROWS]).detach()
    model = Experts(ep_size=1) if kind == "ep" else Layers()
    model.load_state_dict(state)
    return model(x).detach()


@pytest.mark.parametrize(("kind", "stage"), [("tp", 3), ("tp", 1), ("ep", 3), ("ep", 0), ("pp", 1)])
def test_full_weights_leave_and_enter_a_model_in_parts(ranks, tmp_path, kind, stage):
    runs = ranks(2).run(weights, kind=kind, stage=stage, folder=str(tmp_path))
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    if kind != "pp":
        torch.manual_seed(0)
        expected = (Experts(ep_size=1) if kind == "ep" else Layers()).state_dict()
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert runs[1]["consolidated"] is None and runs[0]["consolidated"].keys() == saved.keys()
    if kind != "tp":  # ranks have different parameters
        assert set(runs[0]["names"]) != set(runs[1]["names"]) and len(saved) > len(runs[0]["names"])
    for found in runs:
        assert found["first"].keys() == saved.keys() == found["loaded"].keys()
        for name, value in saved.items():
            assert torch.equal(found["first"][name], value), name
            assert torch.equal(found["loaded"][name], found["new"][name]), name
        # fp32, sums of 8 products in another order
        torch.testing.assert_close(found["answer"], plain(kind, state=found["new"]), rtol=1e-5, atol=1e-5)
        name, value = found["one"]
        assert torch.equal(value, found["new"][name] + 1)
        missing, shape, custom = found["refused"]
        assert f"missing {name}" in missing and name in shape and "custom_load_fn" in custom


def begin(process: Process, *, kind: str) -> list[str]:
    """Training without an optimizer, and parameters that are partitioned while the model is built: results or errors."""
    texts = []
    engine = deepspeed.initialize(model=made(kind), config=config(kind, stage=0, optimizer=False))[0]
    try:
        engine(data()[0])
    except ValueError as error:
        texts.append(str(error))
    engine.destroy()
    try:
        with deepspeed.zero.Init():
            model = made(kind)
        deepspeed.initialize(model=model, config=config(kind, stage=3))
    except ValueError as error:
        texts.append(str(error))
    return texts


@pytest.mark.parametrize(("kind", "what"), [("tp", "layers are cut"), ("ep", "experts are spread")])
def test_what_would_cut_twice_or_without_values_is_refused(ranks, kind, what):
    for late, initialised in ranks(2).run(begin, kind=kind):
        assert what in late and "name one in the configuration" in late
        assert "has no values of its own (zero.Init?)" in initialised and "outside of zero.Init" in initialised


def batches(process: Process, *, folder: str) -> dict:
    """Losses of a pipeline whose batch grows, and the open files around one more engine."""
    monitor = {"enabled": True, "output_path": folder, "job_name": "pipe"}
    settings = config("pp", stage=1, csv_monitor=monitor, steps_per_print=1)
    losses, counts, lines = [], [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ztk.deepspeed").addHandler(handler)
    for _ in range(2):
        engine = deepspeed.initialize(model=made("pp"), config=settings)[0]
        x, y = data()
        losses = []
        for rows in (ROWS, 2 * ROWS, 2 * ROWS, ROWS):
            engine.set_train_batch_size(rows)
            losses.append(float(engine.train_batch(iter([(x[n : n + 1], y[n : n + 1]) for n in range(rows)]))))
        engine.destroy()
        del engine
        gc.collect()  # files that earlier tests of this process left open close at any time
        counts.append(len(os.listdir("/proc/self/fd")))
    logging.getLogger("ztk.deepspeed").removeHandler(handler)
    speeds = [line.split(",")[0] for line in lines if "SamplesPerSec" in line]
    return {"losses": losses, "files": counts, "speeds": speeds}


def test_a_pipelines_batch_changes_and_its_losses_are_written(ranks, tmp_path):
    runs = ranks(2).run(batches, folder=str(tmp_path))
    model = nn.Sequential()
    for seed in range(1234, 1238):  # as seed_layers has it
        torch.manual_seed(seed)
        model.append(nn.Linear(WIDTH, WIDTH))
    optimizer, (x, y), expected = torch.optim.SGD(model.parameters(), lr=0.1), data(), []
    for rows in (ROWS, 2 * ROWS, 2 * ROWS, ROWS):
        loss = F.mse_loss(model(x[:rows]), y[:rows])
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for found in runs:
        assert found["losses"] == pytest.approx(expected, rel=1e-5)  # fp32, four steps
        assert found["files"][1] <= found["files"][0]  # fewer where a group of an earlier test closes meanwhile
    counted = [
        f"epoch=0/micro_step={rows * ROWS}/global_step={step}" for step, rows in ((3, 5), (4, 6))
    ]  # two steps warm up
    assert [run["speeds"] for run in runs] == [2 * counted, []]
    (file,) = Path(tmp_path).glob("**/*train_loss*.csv")
    rows = [line.split(",")[1] for line in file.read_text().splitlines() if "train_loss" not in line]
    assert [float(value) for value in rows] == pytest.approx(expected * 2, rel=1e-5)  # of both engines
