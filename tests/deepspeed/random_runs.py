"""Runs of random scripts by an engine on two ranks and by plain PyTorch: equal, or an error that ztk raises, never a silent difference."""

import contextlib
import copy
import dis
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import ztk
import ztk.deepspeed as deepspeed
from tests.deepspeed import random_edits, random_optimizers, scripts
from tests.deepspeed.random_plants import EDITS, planted
from tests.deepspeed.random_scripts import BATCH, CLIP, STEPS, WIDTH, Calls, Model, Script, loop
from ztk.core.runtime import PeerLost, Process
from ztk.zero.parameters.partitioned import partitioned_of


def run_plain(script: Script) -> dict[str, Tensor]:
    model = _loaded(Model(script), script=script)
    held = random_edits.hold(script.edit, module=model, since="before initialize")
    sgd, saved = _optimizer(script, model=model), []
    held += random_edits.hold(script.edit, module=model, since="after initialize")

    def load() -> None:
        model.load_state_dict(saved[0])
        sgd.load_state_dict(saved[1])

    edits = random_edits.Edits(
        script.edit,
        module=model,
        rank=0,
        held=held,
        everywhere=contextlib.nullcontext,
        save=lambda: saved.extend(copy.deepcopy([model.state_dict(), sgd.state_dict()])),
        load=load,
    )
    calls = Calls(
        model=model,
        module=model,
        backward=lambda loss: loss.backward(),
        step=lambda: sgd.step(),  # which a script may replace
        zero_grad=model.zero_grad,
        part=slice(None),
        optimizer=sgd,
        edits=edits,
        gradient_of=lambda parameter: parameter.grad,
        set_gradient=_set,
        clip=_clip,
    )
    loop(script, calls=calls)
    return {name.removesuffix("_orig"): parameter.detach().clone() for name, parameter in model.named_parameters()}


KINDS = ("failed", "raw", "differs", "error", "warning", "equal")  # the first that a rank has is the script's


class Result(NamedTuple):
    """The result of one rank.

    kind: equal; differs (text: where); warning, if rank 0 logged one about the difference; error, if ztk raised it, or plain PyTorch did, too;
    raw, if only torch raised it; failed, in `tests/slow/test_random_scripts.py`: a rank ended. is_reached: the script reached its edit.
    """

    kind: str
    text: str
    is_reached: bool

    @staticmethod
    def of(results: list["Result"]) -> "Result":
        """The worst of the ranks."""
        return min(results, key=lambda result: KINDS.index(result.kind))


def script_of(seed: int, *, plant: str = "") -> Script:
    """Plants that no edit is needed for are looked for in bare scripts."""
    return Script.draw(seed, is_bare=bool(plant) and plant not in EDITS)


def run_engine(process: Process, *, seed: int, plant: str = "") -> Result:
    """Runs the script of `seed` on this rank and compares it with plain PyTorch."""
    script, messages, engines = script_of(seed, plant=plant), [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    edits = None
    with planted(plant), _listening(handler), _folder(process, script=script) as folder:
        try:
            engine, held = _made(script, engines=engines)
            edits = _edits(process, engine=engine, script=script, held=held, folder=folder)
            loop(script, calls=_calls(process, engine=engine, script=script, edits=edits))
            weights = scripts.weights(engine)
        except PeerLost:
            raise
        except Exception as error:
            is_ours = _is_of_ztk(error) or _plain_error(script) == _beginning(error)
            text = f"{type(error).__name__}: {error}"
            return Result("error" if is_ours else "raw", text, edits is not None and edits.is_reached)
        finally:
            for engine in engines:
                engine.destroy()
    said = [
        message
        for message in messages
        if any(words in message for words in (*random_optimizers.WARNINGS, *script.edit.warnings))
    ]
    return _compared(process, script=script, weights=weights, said=said, is_reached=edits.is_reached)


def _compared(process: Process, *, script: Script, weights: dict, said: list[str], is_reached: bool) -> Result:
    """said: rank 0's warnings about possible differences."""
    if error := _plain_error(script):
        return Result("differs", f"plain PyTorch raises {error}", is_reached)
    # fp32: two orders of summation over STEPS steps, values below 2; fp16: one rounding of such values per step.
    where = _difference(weights, run_plain(script), tolerance=STEPS * 2**-10 if script.fp16 else 2e-5)
    if where and any(everyone := process.comm.gather_objects(said)):
        return Result("warning", next(filter(None, everyone))[0], is_reached)
    return Result("differs" if where else "equal", where, is_reached)


def _calls(process: Process, *, engine: deepspeed.DeepSpeedEngine, script: Script, edits: random_edits.Edits) -> Calls:
    cut = BATCH - 1 if script.uneven else BATCH // 2
    is_sharded, gathers = script.heeds and script.stage > 0, script.heeds and script.stage == 3

    def backward(loss: Tensor) -> None:
        (engine.scale(loss) if script.fp16 and script.heeds else loss).backward()

    return Calls(
        model=engine,
        module=engine.module,
        backward=backward if script.calls_backward else engine.backward,
        step=engine.step,
        zero_grad=engine.zero_grad,
        part=slice(cut) if process.rank == 0 else slice(cut, BATCH),
        optimizer=engine.optimizer.optimizer if script.optimizer.of_client else engine.optimizer,
        edits=edits,
        gradient_of=deepspeed.utils.safe_get_full_grad if is_sharded else lambda parameter: parameter.grad,
        set_gradient=deepspeed.utils.safe_set_full_grad if is_sharded else _set,
        clip=_clip_full if is_sharded else _clip,
        gathered=_everywhere if script.gathered[1] else deepspeed.zero.GatheredParameters,
        around=_everywhere if gathers else contextlib.nullcontext,
        dtype=torch.float16 if script.fp16 else torch.float32,
        loss_factor=process.world_size,  # the engine divides by it
    )


def _edits(
    process: Process, *, engine: deepspeed.DeepSpeedEngine, script: Script, held: list, folder: str | None
) -> random_edits.Edits:
    return random_edits.Edits(
        script.edit,
        module=engine.module,
        rank=process.rank,
        held=held,
        everywhere=_everywhere,
        save=lambda: engine.save_checkpoint(folder),
        load=lambda: engine.load_checkpoint(folder),
    )


def _everywhere(parameters: list[nn.Parameter]) -> deepspeed.zero.GatheredParameters:
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


def _is_of_ztk(error: BaseException) -> bool:
    """A line of ztk has raised it, not a function of torch that such a line called."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    is_there = Path(code.co_filename).is_relative_to(Path(ztk.__file__).parent)
    return is_there and code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _beginning(error: BaseException) -> str:
    """The message without names of classes and version counters."""
    return f"{type(error).__name__}: {error!s:.60}"


def _plain_error(script: Script) -> str:
    try:
        run_plain(script)
    except Exception as error:
        return _beginning(error)
    return ""


def _made(script: Script, *, engines: list) -> tuple[deepspeed.DeepSpeedEngine, list]:
    """The engine, which is also appended to `engines`, and the parameters that the script holds."""
    zero = {} if script.offload == "none" else {"offload_optimizer": {"device": "cpu"}}
    config = scripts.config(stage=script.stage, zero=zero, gradient_clipping=0.0)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.05, "momentum": script.momentum}}
    if script.fp16:
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
        if script.heeds and script.spectral:
            config["data_types"] = {"buffer_dtype": "fp16"}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=script.built != "plain"):
        if script.built == "pretrained":  # as transformers does it where an Init goes on around from_pretrained
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = Model(script)
            model.state_dict()
            model = _loaded(model, script=script)
        else:
            model = Model(script)
    client = None if script.optimizer.kind == "config" else _optimizer(script, model=model)
    held = random_edits.hold(script.edit, module=model, since="before initialize")
    engines.append(deepspeed.initialize(model=model, optimizer=client, config=config)[0])
    return engines[0], held + random_edits.hold(script.edit, module=engines[0].module, since="after initialize")


def _optimizer(script: Script, *, model: Model) -> torch.optim.SGD:
    return random_optimizers.optimizer_of(
        script.optimizer, module=model, momentum=script.momentum, decays=script.decays
    )


def _loaded(model: Model, *, script: Script) -> Model:
    """Loads the values of a file, if the script has one."""
    generator = torch.Generator().manual_seed(script.seed)
    for parameter in model.parameters() if script.built == "pretrained" else ():
        values = torch.randn(parameter.numel(), generator=generator) / WIDTH**0.5
        if (partitioned := partitioned_of(parameter)) is None:
            parameter.data.copy_(values.view(parameter.shape))
        else:
            partitioned.fill(lambda start, stop, values=values: values[start:stop])
    return model


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float) -> str:
    """The parameter that is furthest off, if it is further than `tolerance`."""
    worst = {
        name: float((found[name] - value).abs().max()) if name in found else float("inf")
        for name, value in expected.items()
    }
    name = max(worst, key=lambda key: float("inf") if worst[key] != worst[key] else worst[key])
    return "" if worst[name] <= tolerance else f"{name} by {worst[name]:.2g}"


@contextlib.contextmanager
def _folder(process: Process, *, script: Script) -> Iterator[str | None]:
    """One for both ranks, if the script saves."""
    if script.edit.how != "checkpoint":
        yield None
        return
    with tempfile.TemporaryDirectory() as own:
        yield process.comm.gather_objects(own)[0]


@contextlib.contextmanager
def _listening(handler: logging.Handler) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("ztk.deepspeed", "ztk.zero.parameters.held")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _set(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.grad = value


def _clip(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, CLIP)


def _clip_full(parameters: list[nn.Parameter]) -> None:
    """The same of sharded gradients."""
    gradients = {parameter: deepspeed.utils.safe_get_full_grad(parameter) for parameter in parameters}
    norm = torch.stack([gradient.norm() for gradient in gradients.values() if gradient is not None]).norm()
    for parameter, gradient in gradients.items():
        if gradient is not None:
            deepspeed.utils.safe_set_full_grad(parameter, gradient * min(1.0, CLIP / (float(norm) + 1e-6)))
