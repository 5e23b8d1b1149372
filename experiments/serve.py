"""Answers requests over HTTP: the program of `python run.py task=serve`."""

import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from ztk.config import Config, gives_rewards
from ztk.core.policies.inference import ServeConfig
from ztk.core.runtime import Process
from ztk.experiments.generate import (
    Answering,
    answering,
    cost_of_weights,
    expected_of,
    release_module,
    usual_sampling,
)
from ztk.experiments.ranks import started
from ztk.experiments.scoring import open_scorer
from ztk.serve.app import ServePolicy, Server, calm_process
from ztk.serve.bodies import Limits
from ztk.serve.scores import ScoreServer
from ztk.serve.weights import Incoming

_TERMINATED = 128 + signal.SIGTERM  # exit code of a process that SIGTERM ends before it serves


def main(config: Config) -> None:
    """Serves until SIGTERM or SIGINT. Running answers then have `serve.drain_seconds` to finish.

    Raises:
        PeerLost: a rank that shares the model has ended.
        ValueError: the model cannot be opened or run, the port is taken, or the key's variable is not set.
    """
    # Before the model is opened, which can take minutes. Rank 0 serves.
    key = _key(config.serve.api_key_variable)
    _check_tls(config.serve)
    listening = bind(config.serve.host, port=config.serve.port) if os.environ.get("RANK", "0") == "0" else None
    if listening is not None:
        print(f"opening {config.inference.model}; the next line has the address", flush=True)
    if gives_rewards(config.inference.model):
        assert listening is not None, "one rank scores"
        with started(config) as process:
            score(config, process=process, listening=listening, api_key=key)
        return
    with answering(config) as leading:
        if leading is not None:
            assert listening is not None, "rank 0 leads"
            serve(config, answering=leading, listening=listening, api_key=key)


def serve(config: Config, *, answering: Answering, listening: socket.socket, api_key: str | None = None) -> None:
    """Serves until a signal, or until the engine fails: running answers then end with its error, which is raised. Raises as `main`.

    listening: a socket of `bind`. api_key: required in requests.
    """
    chosen, opened, generator = config.serve, answering.opened, answering.generator
    cost_of_weights(config, answering=answering)
    incoming = None
    if (expected := expected_of(config, opened=opened)) is not None:
        incoming = Incoming(expected, folder=chosen.weights_path)
    release_module(opened)
    opened = replace(opened, name=chosen.model_name or opened.name)
    server = Server(
        generator,
        opened=opened,
        policy=_policy(config, api_key=api_key),
        sampling=usual_sampling(config),
        incoming=incoming,
    )
    for name, nbytes in generator.adapters.items():
        print(f"adapter {name}: {nbytes / 2**20:.1f} MiB of merged weights", flush=True)
    http = _http(config, app=server.app)
    server.on_failure(lambda: setattr(http, "should_exit", True))
    try:
        _run(config, http=http, name=opened.name, verb="answers", listening=listening)
    finally:
        server.stop(drain_seconds=0)
    if server.error is not None:
        raise server.error


def score(config: Config, *, process: Process, listening: socket.socket, api_key: str | None = None) -> None:
    """Scores texts with a reward model until a signal. Takes the arguments of `serve`, and raises the errors of `serve` and `open_scorer`."""
    scorer = open_scorer(config, process=process)
    name = config.serve.model_name or Path(str(config.inference.model)).name
    server = ScoreServer(scorer, name=name, policy=_policy(config, api_key=api_key))
    try:
        _run(config, http=_http(config, app=server.app), name=name, verb="scores", listening=listening)
    finally:
        server.stop()


def _policy(config: Config, *, api_key: str | None) -> ServePolicy:
    chosen = config.serve
    return ServePolicy(
        api_key=api_key,
        max_waiting=chosen.max_waiting,
        stops=tuple(config.sampling.stop or ()),
        max_tokens=config.sampling.max_tokens,
        limits=_limits(config),
        tool_format=chosen.tool_parser,
        hosts=(chosen.host, *(chosen.allowed_hosts or ())),
        origins=tuple(chosen.cors_origins or ()),
    )


def _http(config: Config, *, app: ASGIApp) -> uvicorn.Server:
    chosen = config.serve
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            timeout_graceful_shutdown=max(1, int(chosen.drain_seconds)),
            ssl_certfile=chosen.tls_certificate,
            ssl_keyfile=chosen.tls_key,
        )
    )


def _run(config: Config, *, http: uvicorn.Server, name: str, verb: str, listening: socket.socket) -> None:
    """Serves until a signal, or until `http` is to exit, and prints the address first."""
    chosen = config.serve
    _claim(chosen.host, port=chosen.port, by=listening.listen)
    host, port = listening.getsockname()[:2]
    scheme = "http" if chosen.tls_certificate is None else "https"
    print(f"{name} {verb} on {scheme}://{host}:{port}", flush=True)
    before = signal.signal(signal.SIGTERM, lambda *_: None if http.started else sys.exit(_TERMINATED))
    try:
        with calm_process():
            http.run(sockets=[listening])  # raises the signal that ended it again on return
    finally:
        signal.signal(signal.SIGTERM, before)


def _limits(config: Config) -> Limits:
    chosen = config.serve
    assert chosen.max_body_bytes is not None and chosen.max_answers is not None, "task=serve sets them"
    assert chosen.max_logprobs is not None and chosen.max_stops is not None, "task=serve sets them"
    return Limits(
        body_bytes=chosen.max_body_bytes,
        answers=chosen.max_answers,
        logprobs=chosen.max_logprobs,
        stops=chosen.max_stops,
    )


def _check_tls(chosen: ServeConfig) -> None:
    """Raises ValueError for a certificate that cannot be read, or a key without one."""
    if chosen.tls_certificate is None:
        if chosen.tls_key is not None:
            raise ValueError(f"serve.tls_key={chosen.tls_key} goes with serve.tls_certificate: add it")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chosen.tls_certificate, chosen.tls_key)
    except OSError as error:
        raise ValueError(f"serve.tls_certificate={chosen.tls_certificate}: {error}; name PEM files") from error


def _key(variable: str | None) -> str | None:
    """Returns the key, which is not in any file of the run."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ValueError(
            f"serve.api_key_variable={variable}: the environment has no such variable; export {variable}=KEY"
        )
    return os.environ[variable]


def bind(host: str, *, port: int) -> socket.socket:
    """Returns a socket that has the address and does not listen yet: clients are refused until the model is open.

    Raises ValueError if it is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _claim(host, port=port, by=lambda: listening.bind((host, port)))
    return listening


def _claim(host: str, *, port: int, by: Callable[[], None]) -> None:
    try:
        by()
    except OSError as error:  # another process may have begun to listen while the model was opened
        raise ValueError(
            f"serve.port={port} of serve.host={host}: {error.strerror}; choose another, or serve.port=0"
        ) from error
