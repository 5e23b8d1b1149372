"""What `task=plan` accepts: the command line of a pretraining run that it can trace."""

from collections.abc import Iterator

from ztk.config.hugging_face import is_hugging_face
from ztk.config.machine import Machine
from ztk.config.schema import Config, ZeroEngine
from ztk.policies.hardware import NAMES
from ztk.policies.plan import untraced

PLAN = "plan"


def planning_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """One line per fault, each with its fix."""
    if config.task.name != PLAN:
        return
    if machine.started_ranks:
        yield f"task=plan runs on one process and {machine.started_ranks} ranks are started: start it by `python run.py`"
    if config.zero.engine is not ZeroEngine.ztk:
        yield f"zero={config.zero.engine.value}: task=plan traces ztk's own engine; use zero=stage0 to stage3"
    if is_hugging_face(config.model):
        yield "model=hf: task=plan traces ztk's own decoder; use ztk.plan with a function that builds the model"
    if config.model.experts is not None:
        yield (
            f"model.experts={config.model.experts}: task=plan does not trace experts, whose rows depend on values; use a dense "
            "model such as model=tiny"
        )
    yield from _hardware_faults(config)
    topology = config.topology
    yield from untraced(pipeline=topology.pipeline, expert=1, inputs_on_cpu=config.recompute.inputs_on_cpu)


def _hardware_faults(config: Config) -> Iterator[str]:
    """Hardware is described completely or not at all."""
    missing = [name for name in NAMES if getattr(config.hardware, name) is None]
    if missing and len(missing) < len(NAMES):
        keys = " ".join(f"hardware.{name}=VALUE" for name in missing)
        yield f"hardware.{missing[0]} has no value: choose hardware=h100 or another, or add {keys}"
