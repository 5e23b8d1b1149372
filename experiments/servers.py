"""Servers that draw for a run, by the keys of `rollout`."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from ztk import checkpoint
from ztk.config import Config
from ztk.core.policies.rollout import RolloutIdentity, ServerApi, TransferName
from ztk.experiments.ray_servers import RayServers, finder, placed
from ztk.report import RunFolder
from ztk.rl.rollout import ServedRollouts
from ztk.rl.rollout.clients import Channel, ZtkClient
from ztk.rl.rollout.published import Files, Publisher, Shards
from ztk.rl.rollout.vllm import VllmClient
from ztk.train.engine import Engine


def channels_of(
    urls: Sequence[str],
    *,
    seconds: float,
    variable: str | None,
    key: str,
    finders: Mapping[int, Callable[[], str]] | None = None,
) -> list[Channel]:
    """Returns the channels of servers. seconds: time until a request counts as lost. variable: environment variable with their key.
    finders: return the addresses of those that move, by their place in `urls`.

    Raises ValueError, which names `key`, if there is no such variable.
    """
    if variable is not None and not os.environ.get(variable):
        raise ValueError(f"{key}={variable}: the environment has no such variable; export {variable}=KEY")
    api_key = None if variable is None else os.environ[variable]
    found = finders or {}
    return [
        Channel(f"{url} {number}" if number in found else url, seconds=seconds, api_key=api_key, find=found.get(number))
        for number, url in enumerate(urls)
    ]


def open_served(config: Config, *, actor: Engine) -> ServedRollouts:
    """Opens `rollout.servers`, and starts those that Ray places. A collective call. Raises ValueError as `channels_of`."""
    rollout = config.rollout
    assert rollout.servers is not None and rollout.servers_wait is not None, "the configuration is checked"
    run = RunFolder(config.output_dir).path.absolute()
    vocabulary, folder = config.model.vocab_size, run / "served_weights"
    ranks = config.topology.tensor if rollout.identity is RolloutIdentity.exact else None
    folders = placed(rollout.servers, folder=run / "ray_servers")
    channels = channels_of(
        rollout.servers,
        seconds=rollout.servers_wait,
        variable=rollout.servers_key_variable,
        key="rollout.servers_key_variable",
        finders={number: finder(own) for number, own in folders.items()},
    )
    started = _started(config, actor=actor, folders=[*folders.values()]) if folders else None
    if rollout.servers_transfer is TransferName.gloo:
        publisher: Publisher = Shards(
            actor,
            folder=folder,
            save=save_file,
            opens=partial(safe_open, framework="pt"),
            channels=channels,
            timeout_seconds=rollout.servers_wait,
        )
    else:
        publisher = Files(actor, folder=folder, save=save_file)
    return ServedRollouts(
        actor,
        channels=channels,
        open_client=lambda channel, parameters: (
            VllmClient(channel, vocabulary=vocabulary)
            if rollout.servers_api is ServerApi.vllm
            else ZtkClient(channel, parameters=parameters, ranks=ranks, reads=rollout.servers_transfer == "folder")
        ),
        publisher=publisher,
        patience_seconds=rollout.servers_wait,
        started=started,
    )


def _started(config: Config, *, actor: Engine, folders: Sequence[Path]) -> RayServers | None:
    """Starts servers of Ray on rank 0. They begin with the current weights, or with the weights of `model.path`. A collective call."""
    model = config.model.path
    if model is None:
        step = checkpoint.save(actor, folder=folders[0].parent / "model", keep=1)
        model = str(step.path)
    if actor.comm.rank != 0:
        return None
    key, device = config.rollout.servers_key_variable, actor.process.device.type
    words = [
        f"inference.model={model}",
        "serve.port=0",
        f"launch.device={device}",
        f"launch.threads={config.launch.threads}",
    ]
    return RayServers(
        folders,
        words=words if key is None else [*words, f"serve.api_key_variable={key}"],
        environment={} if key is None else {key: os.environ[key]},
        device=device,
    )
