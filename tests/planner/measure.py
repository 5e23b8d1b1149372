"""Plans a run and executes it, to compare the plan with the counters of real ranks."""

import functools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.device_tagged import products_of_torch
from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.hardware import Hardware
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process, Tier, Topology
from ztk.core.runtime.part import InitialValues
from ztk.hf.causal import open_causal
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import PipelinePolicy
from ztk.parallel.recompute import RecomputePolicy
from ztk.parallel.tensor import TensorPolicy
from ztk.planner import Plan, plan
from ztk.planner.trace import STEPS, wire_by_axis
from ztk.planner.tracker import StepTracker
from ztk.zero.offload import HostStore, NvmeStore, OffloadPolicy

STATE = ("parameters", "gradients", "optimizer", "average")
SHAPE = {"vocab_size": 256, "dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "hidden_dim": 384, "max_seq_len": 128}
BATCH = (4, 128)
_SIZES_OF_TRANSFORMERS = {
    **{"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384, "max_position_embeddings": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
_EXPERTS_OF_TRANSFORMERS = {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One configuration. zero: fields of ZeroPolicy without the stage."""

    ranks: int
    stage: int
    offload: str = "none"
    parameters: str = "none"
    fraction: float = 1.0  # of the optimizer's states, offloaded
    dtype: str = "fp32"
    optimizer: str = "adamw"
    states: str = "fp32"
    master: str | None = None
    recompute: str = "none"
    inputs_on_cpu: bool = False  # of recomputed blocks
    contiguous: bool = False
    tensor: int = 1
    sequence: int = 1
    context: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    tied: bool = False
    layers: int = SHAPE["layers"]  # of the native decoder
    experts: int = 0  # of every second block
    expert: int = 1  # ranks over which they are spread
    accumulation: int = 1
    ema: str | None = None  # the tier of an average of the weights
    family: str | None = None  # of transformers: its model in place of the native decoder
    zero: dict[str, Any] = field(default_factory=dict)

    def policies(self, folder: str) -> dict[str, Any]:
        """Keywords that `plan` and `parallelize` share."""
        return {
            "optimizer": OptimizerPolicy(name=self.optimizer, clip_grad_norm=1.0, states=self.states),
            "precision": PrecisionPolicy.named(self.dtype, master=self.master),
            "zero": ZeroPolicy(stage=self.stage, **self.zero),
            "offload": OffloadPolicy(
                optimizer=self.offload,
                optimizer_fraction=self.fraction,
                parameters=self.parameters,
                nvme_path=folder,
                buffer_bytes=1 << 22,
            ),
            "tensor": TensorPolicy(sequence_parallel=self.sequence_parallel),
            "recompute": RecomputePolicy(
                mode=self.recompute, inputs_on_cpu=self.inputs_on_cpu, contiguous=self.contiguous
            ),
            "ema": None if self.ema is None else EmaPolicy(offload=self.ema),
            "pipeline": PipelinePolicy(schedule=self.schedule, virtual_stages=self.virtual_stages),
            "accumulation_steps": self.accumulation,
        }

    @property
    def topology(self) -> Topology:
        return Topology(
            pipeline=self.pipeline,
            tensor=self.tensor,
            sequence=self.sequence,
            context=self.context,
            expert=self.expert,
            intra_node=self.zero.get("hpz_partition_size", 1),
        )

    def build(self, folder: str) -> tuple[nn.Module, InitialValues]:
        """The model, without memory, and its first values. folder: for the configuration of a model of transformers."""
        if self.family is not None:
            return open_causal(str(saved_config(self.family, folder=Path(folder))), init="random", seed=0)
        with torch.device("meta"):
            model = self.model()
        return model, functools.partial(initial_values, model, seed=0)

    def model(self) -> Decoder:
        experts = {"experts": self.experts, "experts_every": 2, "expert_hidden_dim": 64} if self.experts else {}
        return Decoder(DecoderConfig(**SHAPE | experts | {"layers": self.layers}, tie_embeddings=self.tied))

    def __str__(self) -> str:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        usual = {name: getattr(_USUAL, name) for name in named}
        return " ".join(f"{k}={v}" for k, v in named.items() if v != usual[k] or k in ("ranks", "stage"))


_USUAL = Case(ranks=1, stage=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Of one rank. peak: bytes that operations returned and that were alive at one time; with buffers that threads or shared memory hold."""

    state: dict[str, dict[str, int]]
    wire: dict[str, dict[str, int]]
    disk: tuple[int, int]
    peak: int


def saved_config(family: str, *, folder: Path) -> Path:
    """A folder with the config.json of a small model of `family`, of this process alone."""
    from transformers import AutoConfig

    names = {"n_embd": 128, "n_layer": 4, "n_head": 4} if family == "gpt2" else _SIZES_OF_TRANSFORMERS
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if family == "gpt2" else {}
    experts = _EXPERTS_OF_TRANSFORMERS if family == "qwen2_moe" else {}
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    target = folder / f"{family}-{os.getpid()}"
    AutoConfig.for_model(family, vocab_size=256, **names, **dropout, **experts, **special).save_pretrained(target)
    return target


def planned(case: Case, *, folder: str, hardware: Hardware | None = None) -> Plan:
    """The plan of `ztk.plan`."""
    tokens = torch.empty(BATCH, dtype=torch.int64, device="meta")
    return plan(
        lambda: case.build(folder)[0],
        batch=(tokens, tokens),
        world_size=case.ranks,
        topology=case.topology,
        hardware=hardware,
        **case.policies(folder),
    )


def made(process: Process, *, case: Case, folder: str) -> Measured:
    """A rank's counters after the same number of steps; traffic is counted in the last step only.

    The rank takes the branches of a device other than a CPU, which the plan is for: fused operations and attention. Between steps the update
    that overlaps the forward ends and writes reach the disk, so that no read finds its bytes still in memory.
    """
    process = process.arrange(case.topology)
    tracker = StepTracker(device="cpu")
    model, values = case.build(folder)
    tokens = torch.randint(256, BATCH)
    with branches_of_a_gpu(), equal_loads(), tracker:
        engine = parallelize(model, process=process, initial_values=values, **case.policies(folder))
        for tensor in host_memory(engine):
            tracker.leave_out(tensor)
        peak = 0
        for _ in range(STEPS):
            tracker.restart()
            process.mesh.counters.reset()
            before = engine.io.read_bytes, engine.io.write_bytes
            take_step(engine, case=case, tokens=tokens)
            settle(engine)
            peak = max(peak, tracker.peak.nbytes)
        measured = Measured(
            state={
                tier.label: {name: nbytes for name, nbytes in engine.memory.by_category(tier).items() if name in STATE}
                for tier in Tier
            },
            wire=wire_by_axis(process.mesh),
            disk=(engine.io.read_bytes - before[0], engine.io.write_bytes - before[1]),
            peak=peak,
        )
        engine.close()
    return measured


def step_seconds(process: Process, *, case: Case, folder: str, steps: int) -> list[float]:
    """Seconds of steps of a run on a CPU, after as many warm-up steps as in a plan. The steps follow one another, so that the writes of one
    reach the disk during the next."""
    process = process.arrange(case.topology)
    model, values = case.build(folder)
    tokens = torch.randint(256, BATCH)
    engine = parallelize(model, process=process, initial_values=values, **case.policies(folder))
    found = []
    for _ in range(STEPS + steps):
        process.comm.barrier()
        start = time.perf_counter()
        take_step(engine, case=case, tokens=tokens)
        process.comm.barrier()
        found.append(time.perf_counter() - start)
    engine.close()
    return found[STEPS:]


def take_step(engine: Any, *, case: Case, tokens: torch.Tensor) -> None:
    """One optimizer step. tokens: [B, T]."""
    if case.pipeline > 1:
        engine.train_batch([(tokens, tokens)] * case.accumulation)
    else:
        for _ in range(case.accumulation):
            engine.backward(engine(tokens, tokens))
            engine.step()


def settle(engine: Any) -> None:
    """Returns when the last update has ended and its writes are on the disk."""
    engine.zero._update.await_last()
    stores = engine.zero._stores
    for store in (stores.optimizer, stores.parameters, stores.gradients, stores.average):
        if store is not None:
            store.flush()


@contextmanager
def equal_loads() -> Iterator[None]:
    """Inside, routers choose every expert equally often, as a plan assumes: the logits of token t are largest at experts t, t + 1, .."""
    moe = sys.modules["ztk.nn.moe"]
    route = moe.moe_route

    def in_turn(logits: torch.Tensor, *, top_k: int):
        tokens, experts = logits.shape
        order = (torch.arange(experts) - torch.arange(tokens)[:, None]) % experts
        with torch.no_grad():
            logits.data.copy_(-order.to(logits.dtype))
        return route(logits, top_k=top_k)

    with mock.patch.object(moe, "moe_route", in_turn):
        yield


@contextmanager
def branches_of_a_gpu(*, offloads: bool = True) -> Iterator[None]:
    """Inside, ranks on CPUs call the operations that GPUs call, where the CPU has others with other temporaries.

    offloads: whether states may be on another tier; where not, the update has a GPU's table of parameter groups, too.
    """
    with ExitStack() as stack:
        for name in ("swiglu", "geglu"):
            module = sys.modules[f"ztk.kernels.ops.{name}"]
            stack.enter_context(mock.patch.object(module, "composite", lambda x: False))
        attention, linear = sys.modules["ztk.nn.self_attention"], sys.modules["ztk.nn.linear"]
        stack.enter_context(mock.patch.object(attention, "causal_attention", _attention_of_a_gpu))
        stack.enter_context(products_of_torch())
        stack.enter_context(mock.patch.object(linear, "_computes_elsewhere", lambda x: True))
        update = sys.modules[
            "ztk.zero.update.piece_update"
        ]  # a table of the groups per piece, where states are on the device
        stack.enter_context(mock.patch.object(update, "_is_on_device", lambda master: not offloads))
        yield


def _attention_of_a_gpu(query: torch.Tensor, *, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[B, T, heads, D]: ztk's op, whichever device computes it."""
    return sys.modules["ztk.nn.self_attention"].attention(query, key, value)


def host_memory(engine: Any) -> Iterator[torch.Tensor]:
    """The memory of the host tier's stores: main memory, which here is also the device's."""
    stores = engine.zero._stores
    every = (stores.optimizer, stores.gradients, stores.parameters, stores.average)
    for store in {id(store): store for store in every}.values():
        if isinstance(store, HostStore):
            yield from (slot.tensor for slot in store._slots)
        if isinstance(store, NvmeStore):
            yield store._pool._region.bytes
