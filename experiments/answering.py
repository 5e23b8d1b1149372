"""The common parts of `task=generate`, `task=serve` and `task=eval`: the engine and the default sampling of a configuration."""

import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ztk import checkpoint, kernels
from ztk.config import Config
from ztk.core.policies.inference import CacheFormat
from ztk.core.policies.runs import streams_layers
from ztk.core.policies.tier import Tier
from ztk.core.runtime.comm import Comm
from ztk.experiments.ranks import started
from ztk.inference import Generator, InferencePolicy, Packed, SamplingParams, perplexity
from ztk.inference.packed import MANIFEST
from ztk.nn.low_rank import Adapter
from ztk.report.folder import PACKED
from ztk.serve.models import Opened, open_model
from ztk.serve.packing import calibration_tokens, open_streamed, opened_unread
from ztk.zero.offload import OffloadPolicy

_HELD_OUT_TOKENS = 2048
_USUAL_WINDOW = 2048  # most tokens per sequence in task=eval if eval.seq_len is not set


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Perplexity of held-out text with the weights as stored, and in the chosen format."""

    stored: float
    chosen: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Answering:
    """An opened model. stored: perplexity of `inference.held_out` with the weights as stored, if layers stream: it must then be measured
    before the model is opened.
    """

    opened: Opened
    generator: Generator
    stored: float | None = None


@contextmanager
def answering(config: Config) -> Iterator[Answering | None]:
    """Yields `open_answering` on the rank that answers.

    On other ranks that share the model, yields None after the answering rank has finished.

    After an error no rank waits for the others, because the launcher stops all ranks.

    Raises:
        ValueError: as `open_answering`.
    """
    if config.topology.tensor == 1:
        kernels.set_backend(config.kernels.backend)
        stored = _streamed_perplexity(config)
        opened, generator = open_answering(config)
        yield Answering(opened=opened, generator=generator, stored=stored)
        return
    path, ema = config.inference.model, bool(config.inference.ema)
    with started(config) as process, opened_unread(path, ema=ema) as opened:
        comm = process.mesh.comm("tp")
        stored = _shared_perplexity(config, opened=opened, comm=comm)
        options = {"draft": _draft(config), "adapters": _adapters(config)}
        generator = Generator(opened.module, policy=_calibrated(config, opened=opened), comm=comm, **options)
        if streams_layers(config):
            if config.offload.nvme_path is None:
                with suppress(OSError):  # another rank's part still exists
                    os.rmdir(_packed_folder(config))
            if generator.leads:
                print(generator.plan, flush=True)
        if generator.follows:
            release_module(opened)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the answering rank determines the end
            generator.follow()
            yield None
            return
        yield Answering(opened=opened, generator=generator, stored=stored)
        generator.close()


def open_answering(config: Config) -> tuple[Opened, Generator]:
    """Opens the model of `inference.model` and its engine, on one rank.

    With offload=nvme it opens packed weights, which it writes first if necessary, and prints the plan. Unless the user names a folder,
    the files are unlinked and freed with the process.

    Raises:
        ValueError: as `open_model`, `pack_model` and `Generator`.
    """
    path, ema = config.inference.model, bool(config.inference.ema)
    if not streams_layers(config):
        adapters = _adapters(config)
        with opened_unread(path, ema=ema) as opened:
            policy = _calibrated(config, opened=opened)
            return opened, Generator(opened.module, policy=policy, draft=_draft(config), adapters=adapters)
    to = _packed_folder(config)
    try:
        options = {"calibration": config.inference.calibration, "on_packed": _say_packed}
        opened = open_streamed(path, weights=_format(config), to=to, ema=ema, **options)
        policy = _policy(config) if isinstance(opened.module, Packed) else _calibrated(config, opened=opened)
        generator = Generator(opened.module, policy=policy, draft=_draft(config))
    finally:
        if config.offload.nvme_path is None:
            shutil.rmtree(to, ignore_errors=True)
    print(generator.plan, flush=True)
    return opened, generator


def _adapters(config: Config) -> dict[str, Adapter]:
    """Reads the adapters of `inference.adapters`. Raises ValueError for a folder without one, with its name."""
    found = {}
    for name, path in (config.inference.adapters or {}).items():
        try:
            found[name] = checkpoint.read_adapter(path)
        except ValueError as error:
            raise ValueError(f"inference.adapters.{name}={path}: {error}") from error
    return found


def _draft(config: Config) -> nn.Module | None:
    path = config.inference.draft_model
    if path is None:
        return None
    module = open_model(path).module
    if isinstance(module, Packed):
        raise ValueError(f"inference.draft_model={path}: has packed weights; name the model itself")
    return module


def _say_packed(packed: Packed) -> None:
    layers = packed.description.layers
    gib = layers * packed.layer_bytes / 2**30
    print(f"packed with weights={packed.weights} into {packed.path}: {layers} layers, {gib:.2f} GiB", flush=True)


def _packed_folder(config: Config) -> str:
    return config.offload.nvme_path or os.path.join(config.output_dir, PACKED)


def _streamed_perplexity(config: Config) -> float | None:
    """Returns the perplexity of `inference.held_out` with streamed layers as stored, or None if it is not needed.

    Its memory is freed before the model is opened in its own format.
    """
    path = config.inference.model
    if config.inference.held_out is None or not streams_layers(config):
        return None
    if Path(path, MANIFEST).is_file():
        raise _only_packed(config, path=path)
    to = os.path.join(_packed_folder(config), f"stored-{uuid.uuid4().hex}")
    try:
        opened = open_streamed(path, weights="stored", to=to, ema=bool(config.inference.ema))
        generator = Generator(opened.module, policy=_as_stored(config, to=to))
    finally:
        shutil.rmtree(to, ignore_errors=True)
    try:
        return perplexity(generator, tokens=_held_out(config, opened=opened))
    finally:
        generator.close()


def _shared_perplexity(config: Config, *, opened: Opened, comm: Comm) -> float | None:
    """Like `_streamed_perplexity`, for a model that ranks share. A collective call."""
    if config.inference.held_out is None or not streams_layers(config):
        return None
    generator = Generator(opened.module, policy=_as_stored(config, to=_packed_folder(config)), comm=comm)
    try:
        if generator.follows:
            generator.follow()
            return None
        return perplexity(generator, tokens=_held_out(config, opened=opened))
    finally:
        generator.close()


def _as_stored(config: Config, *, to: str) -> InferencePolicy:
    policy = _policy(config)
    assert policy.offload is not None, "layers stream"
    return replace(policy, weights="stored", draft_tokens=0, offload=replace(policy.offload, nvme_path=to))


def _held_out(config: Config, *, opened: Opened) -> list[int]:
    """Returns the tokens of the text. Raises ValueError for fewer than two."""
    name = config.inference.held_out
    text = Path(name).read_text(encoding="utf-8", errors="replace")
    tokens = opened.tokenizer.encode(text)[:_HELD_OUT_TOKENS]
    if len(tokens) < 2:
        raise ValueError(f"inference.held_out={name}: has {len(tokens)} tokens; name a longer text")
    return tokens


def _only_packed(config: Config, *, path: object) -> ValueError:
    return ValueError(
        f"inference.held_out={config.inference.held_out}: {path} has the packed weights only; leave it out, or name the model itself"
    )


def cost_of_weights(config: Config, *, answering: Answering) -> Cost | None:
    """Returns and prints the effect of `inference.weights` on `inference.held_out`. None without such a text.

    Raises:
        ValueError: the text has fewer than two tokens, or the model is packed.
    """
    chosen, opened, stored = config.inference, answering.opened, answering.stored
    if chosen.held_out is None:
        return None
    tokens = _held_out(config, opened=opened)
    if stored is None:
        if isinstance(opened.module, Packed):
            raise _only_packed(config, path=opened.module.path)
        stored = perplexity(Generator(opened.module), tokens=tokens)
    cost = Cost(stored=stored, chosen=perplexity(answering.generator, tokens=tokens))
    print(
        f"perplexity of {len(tokens)} tokens of {chosen.held_out}: {cost.stored:.4f} as stored, {cost.chosen:.4f} with "
        f"weights={_format(config)} ({100 * (cost.chosen / cost.stored - 1):+.2f} %)",
        flush=True,
    )
    return cost


def release_module(opened: Opened) -> None:
    """Frees the module's own weights. The engine has copies of the layers, and keeps embeddings and norms."""
    if isinstance(opened.module, nn.Module):
        opened.module.to("meta")


def _format(config: Config) -> str:
    weights = config.inference.weights
    assert weights is not None, "each of the tasks sets it"
    return weights.value


def _calibrated(config: Config, *, opened: Opened) -> InferencePolicy:
    """Returns the policy with the tokens of `inference.calibration`."""
    path = config.inference.calibration
    if path is None:
        return _policy(config)
    return replace(_policy(config), calibration=calibration_tokens(path, tokenizer=opened.tokenizer))


def _policy(config: Config) -> InferencePolicy:
    chosen = config.inference
    return InferencePolicy(
        max_sequences=chosen.max_sequences,
        max_step_tokens=chosen.max_step_tokens,
        step_seconds=chosen.step_seconds,
        max_model_len=config.eval.seq_len or _USUAL_WINDOW if config.task.name == "eval" else chosen.max_model_len,
        lookup_tokens=chosen.lookup_tokens or 0,  # null with task=eval, which does not sample
        draft_tokens=chosen.draft_tokens or 0,  # null without a draft model
        weights=_format(config),
        offload=_offload(config),
        memory_bytes=chosen.memory_bytes,
        device=config.launch.device.value,
        cache_tokens=chosen.cache_tokens,
        cache_dtype=(chosen.cache_dtype or CacheFormat.stored).value,
        exact=chosen.exact is not False,
    )


def _offload(config: Config) -> OffloadPolicy | None:
    chosen = config.offload
    if chosen.optimizer is Tier.none:
        return None
    assert chosen.block_bytes is not None and chosen.threads is not None and chosen.direct_io is not None, (
        "offload=nvme sets them"
    )
    return OffloadPolicy(
        parameters=Tier.nvme,
        nvme_path=_packed_folder(config) if streams_layers(config) else config.offload.nvme_path or config.output_dir,
        block_bytes=chosen.block_bytes,
        threads=chosen.threads,
        direct_io=chosen.direct_io,
    )


def usual_sampling(config: Config) -> SamplingParams:
    """Returns the sampling of `sampling.*`, without stop texts, which are handled outside the engine."""
    given = {name: value for name, value in vars(config.sampling).items() if name != "stop" and value is not None}
    return SamplingParams(**given)
