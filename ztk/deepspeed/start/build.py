"""Builds an engine from a script's model, settings and groups, and rebuilds it if training begins later."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from ztk.core.policies.optimizer import TORCH
from ztk.core.runtime import MemoryLedger, Process, Topology
from ztk.core.runtime.part import Part
from ztk.core.runtime.store import DeviceStore
from ztk.deepspeed.config import Settings
from ztk.deepspeed.engine import owners
from ztk.deepspeed.engine.buffers import cast_buffers
from ztk.deepspeed.engine.gradients import show_gradients
from ztk.deepspeed.engine.offloading import StateOffload
from ztk.deepspeed.experts import expert_degree, give_layer_options
from ztk.deepspeed.optimizers.groups import TrainedGroups, freeze_others, groups_of_config
from ztk.deepspeed.optimizers.sharded import ShardedOptimizer
from ztk.deepspeed.pipe.module import PipelineModule
from ztk.deepspeed.start.process import arrange
from ztk.deepspeed.tools.log import logger
from ztk.deepspeed.zero.leaf import settle_units
from ztk.deepspeed.zero.parameter import name_parameter
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import PipelinePolicy
from ztk.train.engine import Engine
from ztk.zero.parameters.partitioned import ZeroInitContext

NO_OPTIMIZER = (
    "no optimizer was given: training runs with AdamW at lr=0.001; name another in the configuration's section optimizer, or "
    "pass optimizer= to initialize"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Builder:
    """The inputs of an engine. trainable: the parameters that required a gradient when the script passed its model."""

    model: nn.Module
    settings: Settings
    process: Process
    trainable: frozenset[str]
    parts: Mapping[str, Part] | None = None  # of a model that the script has cut itself

    def build(self, trained: TrainedGroups | None) -> tuple[Engine, ShardedOptimizer | None]:
        """Builds the engine and its optimizer. Without groups, the engine runs forward only, without states. A collective call."""
        give_layer_options(self.model, options=self.settings.experts.layers)
        frozen = freeze_others(
            self.model, names={name for own in trained.names for name in own} if trained else frozenset()
        )
        if frozen and trained and self.process.rank == 0:
            shown = ", ".join(frozen[:5]) + (" ..." * (len(frozen) > 5))
            logger.info("not in the optimizer, so held frozen: %s", shown)
        settings = self.settings
        settle_units(self.model, leaves=settings.leaves)
        cast_buffers(self.model, dtype=settings.buffer_dtype, of_parameters=settings.precision.dtype)
        engine = parallelize(
            self.model,
            process=self._arranged(),
            optimizer=trained.policy if trained else OptimizerPolicy(name="sgd", lr=0.0),
            torch_optimizer=trained.client if trained and trained.policy.name == TORCH else None,
            precision=settings.precision,
            zero=settings.zero,
            offload=settings.offload,
            tensor=settings.tensor.policy(self.model),
            accumulation_steps=settings.batch.accumulation,
            pipeline=self._pipeline(),
            experts=settings.experts.pattern,
            parts=self.parts,
            model_divides_sequences=True,
        )
        set_averaging(engine, settings=settings)
        owners.register(engine)
        show_gradients(self.model)
        if settings.zero.shards_parameters:
            for parameter in self.model.parameters():
                name_parameter(parameter)
        moving = StateOffload(engine, policy=settings.offload)
        return engine, ShardedOptimizer(trained, engine=engine, moving=moving) if trained else None

    def _pipeline(self) -> PipelinePolicy | None:
        """Returns the pipeline policy of a model in stages. Its recomputation follows the model or the configuration."""
        if not isinstance(self.model, PipelineModule):
            return None
        if self.settings.pipeline_recompute_interval:
            self.model.recompute_interval = self.settings.pipeline_recompute_interval
        return self.model.policy

    def _arranged(self) -> Process:
        """Returns the process in the mesh that the configuration, the model's stages and its experts require."""
        asked = {
            "expert": expert_degree(self.model, at_least=self.settings.experts.size),
            "tensor": self.settings.tensor.degree,
            "intra_node": self.settings.zero.hpz_partition_size,
        }
        changes, topology = {name: degree for name, degree in asked.items() if degree > 1}, self.process.mesh.topology
        if not changes and topology != Topology():
            return self.process  # arranged by the model itself, or according to mpu
        return arrange(self.process, replace(topology, **changes))

    def begin_training(self, engine: Engine) -> tuple[Engine, ShardedOptimizer]:
        """Replaces `engine`, which only runs forward, by one that trains the parameters that originally required a gradient.

        Full parameters are never materialized, and master weights start from their values in the model's dtype.

        Raises ValueError if experts or layers are cut over ranks already.
        """
        cut = {
            "experts are spread": expert_degree(self.model, at_least=self.settings.experts.size),
            "layers are cut (tensor_parallel)": self.settings.tensor.degree,
        }
        for axis, degree in cut.items():
            if degree > 1:
                raise ValueError(
                    f"{axis} over {degree} ranks already, and no optimizer was given: name one in the configuration, or pass it to "
                    "initialize"
                )
        self.end(engine)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in self.trainable)
        if self.process.rank == 0:
            logger.warning(NO_OPTIMIZER)
        return self.build(groups_of_config(default_optimizer(self.settings), model=self.model, model_parameters=None))

    def end(self, engine: Engine) -> None:
        """Closes `engine` so that another engine can take over the model's sharded parameters. A collective call."""
        comm, device = engine.process.mesh.comm("data"), engine.process.device
        init_context = ZeroInitContext(
            comm=comm, store=DeviceStore(device=device, ledger=MemoryLedger()), on_partition=name_parameter
        )
        owners.forget(engine)
        engine.close(init_context=init_context)
        init_context.close()


def default_optimizer(settings: Settings) -> OptimizerPolicy:
    """Returns DeepSpeed's optimizer for a section without parameters: AdamW, rate 1e-3, betas 0.9 and 0.999, no decay."""
    return OptimizerPolicy(
        name="adamw", lr=1e-3, betas=(0.9, 0.999), eps=1e-8, decay_all=True, clip_grad_norm=settings.gradient_clipping
    )


def set_averaging(engine: Engine, *, settings: Settings) -> None:
    """Applies from the next backward on. Called again when the number of micro-batches changes."""
    ranks = engine.process.mesh.comm("data").size
    averaging, accumulation = settings.averaging, settings.batch.accumulation
    engine.set_averaging(prescale=averaging.factor(ranks), divisor=averaging.divisor(ranks) * accumulation)
