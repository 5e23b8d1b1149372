"""Servers that draw for a run, by the keys of `rollout`."""

import os
from collections.abc import Sequence
from functools import partial

from safetensors import safe_open
from safetensors.torch import save_file

from ztk.config import Config
from ztk.core.policies.rollout import ServerApi
from ztk.report import RunFolder
from ztk.rl.rollout import ServedRollouts
from ztk.rl.rollout.clients import Channel, ZtkClient
from ztk.rl.rollout.vllm import VllmClient
from ztk.train.engine import Engine


def channels_of(urls: Sequence[str], *, seconds: float, variable: str | None, key: str) -> list[Channel]:
    """Returns the channels of servers. seconds: time until a request counts as lost. variable: environment variable with their key.

    Raises ValueError, which names `key`, if there is no such variable.
    """
    if variable is not None and not os.environ.get(variable):
        raise ValueError(f"{key}={variable}: the environment has no such variable; export {variable}=KEY")
    api_key = None if variable is None else os.environ[variable]
    return [Channel(url, seconds=seconds, api_key=api_key) for url in urls]


def open_served(config: Config, *, actor: Engine) -> ServedRollouts:
    """Opens `rollout.servers`. A collective call. Raises ValueError as `channels_of`."""
    rollout = config.rollout
    assert rollout.servers is not None and rollout.servers_wait is not None, "the configuration is checked"
    opens = partial(safe_open, framework="pt") if rollout.servers_transfer == "gloo" else None
    vocabulary = config.model.vocab_size
    return ServedRollouts(
        actor,
        channels=channels_of(
            rollout.servers,
            seconds=rollout.servers_wait,
            variable=rollout.servers_key_variable,
            key="rollout.servers_key_variable",
        ),
        open_client=lambda channel, parameters: (
            VllmClient(channel, vocabulary=vocabulary)
            if rollout.servers_api is ServerApi.vllm
            else ZtkClient(channel, parameters=parameters, opens=opens)
        ),
        folder=RunFolder(config.output_dir).path / "served_weights",
        save=save_file,
        patience_seconds=rollout.servers_wait,
    )
