"""Answer requests over HTTP: the program of `python run.py task=serve`."""

import os
import signal
import socket
import sys
from dataclasses import replace

import uvicorn

from experiments.answering import Answering, answering, cost_of_weights, release_module, usual_sampling
from ztk.config import Config
from ztk.serve.app import ServePolicy, Server

_TERMINATED = 128 + signal.SIGTERM  # of a process that SIGTERM ends before it serves


def main(config: Config) -> None:
    """Serves until SIGTERM or SIGINT; running answers then have `serve.drain_seconds` to end.

    Raises:
        PeerLost: a rank that shares the model is gone.
        ValueError: the model cannot be opened or computed, the port is taken, or the key's variable is not set.
    """
    with answering(config) as leading:
        if leading is not None:
            serve(config, answering=leading)


def serve(config: Config, *, answering: Answering) -> None:
    """Serves until a signal, or until the engine fails: running answers then end with its error, which is raised. Raises as `main`."""
    chosen, opened, generator = config.serve, answering.opened, answering.generator
    cost_of_weights(config, answering=answering)
    release_module(opened)
    opened = replace(opened, name=chosen.model_name or opened.name)
    server = Server(
        generator,
        opened=opened,
        policy=ServePolicy(
            api_key=_key(chosen.api_key_variable),
            max_waiting=chosen.max_waiting,
            stops=tuple(config.sampling.stop or ()),
        ),
        sampling=usual_sampling(config),
    )
    listening = _listen(chosen.host, port=chosen.port)
    host, port = listening.getsockname()[:2]
    print(f"{opened.name} answers on http://{host}:{port}", flush=True)
    options = uvicorn.Config(
        server.app, log_level="warning", timeout_graceful_shutdown=max(1, int(chosen.drain_seconds))
    )
    http = uvicorn.Server(options)
    server.on_failure(lambda: setattr(http, "should_exit", True))
    before = signal.signal(signal.SIGTERM, lambda *_: None if http.started else sys.exit(_TERMINATED))
    try:
        http.run(sockets=[listening])  # raises the signal that ended it once more, when it is done
    finally:
        signal.signal(signal.SIGTERM, before)
        server.stop(drain_seconds=0)
    if server.error is not None:
        raise server.error


def _key(variable: str | None) -> str | None:
    """The key, which is in no file of the run."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ValueError(
            f"serve.api_key_variable={variable}: the environment has no such variable; export {variable}=KEY"
        )
    return os.environ[variable]


def _listen(host: str, *, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        raise ValueError(
            f"serve.port={port} of serve.host={host}: {error.strerror}; choose another, or serve.port=0"
        ) from error
    listening.listen(128)
    return listening
