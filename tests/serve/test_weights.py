"""A server that takes new weights while it runs: afterwards it answers like a server that began with them."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import save, save_file

from tests.core.runtime.test_pulls import address, full
from tests.serve.test_server import start, tiny, wait_until
from ztk.core.runtime.comm.pulls import Offer
from ztk.inference import Generator, InferencePolicy, Output, SamplingParams, UnreadModel
from ztk.nn import Decoder
from ztk.serve.app import ServePolicy
from ztk.serve.loop import EngineLoop, Job, OnUpdate, Outbox, Restarted, Update
from ztk.serve.tokenizers import Bytes
from ztk.serve.weights import Expected, Incoming

HTTP = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=60)
PROMPTS = [[97, 98, 99], [97, 98, 100, 101], [120, 121]]


def other(seed):
    """The parameters of a model of the shape of `tiny`, by name."""
    torch.manual_seed(seed)
    config = tiny(tokenizer=Bytes()).module.config
    return {name: own.detach() for name, own in Decoder(config).named_parameters()}


def taking(tmp_path, *, policy=None, **inference):
    """A server that takes weights below `tmp_path`."""
    opened = tiny(tokenizer=Bytes())
    expected = Expected.of(opened)
    incoming = Incoming(expected, folder=str(tmp_path))
    found = start(opened=opened, policy=policy, incoming=incoming, open_weights=expected.opened, **inference)
    return SimpleNamespace(**vars(found), expected=expected, incoming=incoming)


@pytest.fixture
def running(tmp_path):
    found = taking(tmp_path)
    yield found
    found.stop()


def drawn_by(running, *, prompts=PROMPTS, **more):
    """Answers as (tokens, log-probabilities, versions), greedy by default."""
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "logprobs": 0, "return_token_ids": True} | more
    reply = HTTP.post(f"{running.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return [
        (own["token_ids"], own["logprobs"]["token_logprobs"], own.get("versions")) for own in reply.json()["choices"]
    ]


def drawn_alone(state, *, prompts=PROMPTS, weights="stored"):
    """Greedy answers of a generator that began with this state."""
    module = tiny(tokenizer=Bytes()).module
    module.load_state_dict(state, strict=False)
    sampling = SamplingParams(max_tokens=12, temperature=0, vocabulary=128)
    answers = Generator(module, policy=InferencePolicy(weights=weights)).generate(prompts, sampling=sampling)
    return [(one.tokens, one.logprobs.tolist()) for [one] in answers]


def begin(running, version, **more):
    return HTTP.post(f"{running.url}/v1/weights", json={"version": version} | more)


def send(running, version, tensors):
    return HTTP.put(f"{running.url}/v1/weights/{version}", content=save(tensors))


def take(running, version):
    return HTTP.post(f"{running.url}/v1/weights/{version}")


def sent(running, version, state, **more):
    """The reply to a version whose tensors come in two parts."""
    names = sorted(state)
    assert begin(running, version, **more).status_code == 200
    for part in (names[::2], names[1::2]):
        reply = send(running, version, {name: state[name] for name in part})
        assert reply.status_code == 200, reply.text
    return take(running, version)


def without_versions(answers):
    return [(tokens, pytest.approx(logprobs, rel=1e-6)) for tokens, logprobs, _ in answers]


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_answers_equal_a_server_that_began_with_the_weights(tmp_path, weights):
    running, state = taking(tmp_path, weights=weights), other(11)
    try:
        before = drawn_by(running)
        assert all(versions is None for _, _, versions in before)
        assert sent(running, "v1", state).status_code == 200
        after = drawn_by(running)
        assert drawn_alone(state, weights=weights) == without_versions(after)
        assert [versions for *_, versions in after] == [[{"version": "v1", "tokens": 12}]] * len(PROMPTS)
        assert [tokens for tokens, *_ in before] != [tokens for tokens, *_ in after]
    finally:
        running.stop()


def test_a_folder_is_taken_and_one_elsewhere_refused(running, tmp_path):
    state, folder = other(12), tmp_path / "step-7"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    assert begin(running, "v7", path="step-7").status_code == 200
    assert drawn_alone(state) == without_versions(drawn_by(running))
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    save_file(state, outside / "model.safetensors")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(outside / "model.safetensors")
    for path in (str(outside), f"../{outside.name}", "missing", "linked"):
        reply = begin(running, "v8", path=path)
        assert reply.status_code == 400 and f"path={path}" in reply.json()["error"]["message"]
    assert HTTP.get(f"{running.url}/v1/weights").json()["version"] == "v7"


@contextmanager
def offer_of(state):
    """The address of an offer of this state."""
    with Offer(timeout_seconds=30) as offer:
        offer.publish("v", held=[full(name, value) for name, value in state.items()])
        yield address(offer, "v")


def test_tensors_are_pulled_from_another_process(running):
    state = other(18)
    with offer_of(state) as where:
        reply = begin(running, "v1", offer=where)
    assert reply.status_code == 200 and reply.json()["bytes"] == sum(own.nbytes for own in state.values())
    assert drawn_alone(state) == without_versions(drawn_by(running))


def test_an_owner_that_is_gone_or_offers_others_leaves_the_old_weights(running):
    state, before, reads = other(19), drawn_by(running), []

    def fails():
        reads.append(None)
        raise RuntimeError("gone")

    name = sorted(state)[0]
    held = [full(own, value) for own, value in state.items() if own != name]
    with Offer(timeout_seconds=30) as offer:
        offer.publish("v", held=[*held, replace(full(name, state[name]), read=fails)])
        reply = begin(running, "v1", offer=address(offer, "v"))
    assert reads and reply.status_code == 503, reply.text
    assert "the process that offers tensors is gone" in reply.json()["error"]["message"]
    with offer_of({own: value for own, value in state.items() if own != name}) as where:
        reply = begin(running, "v1", offer=where)
    assert reply.status_code == 400 and f"{name} is missing" in reply.json()["error"]["message"]
    assert begin(running, "v1", offer="http://127.0.0.1:1").status_code == 400
    assert drawn_by(running) == before


def test_tensors_that_do_not_fit_are_named_and_the_old_weights_stay(running):
    state, before = other(13), drawn_by(running)
    name = sorted(state)[0]
    rest = {own: value for own, value in state.items() if own != name}
    assert begin(running, "v1").status_code == 200
    for tensors, words in (
        ({"odd.weight": state[name]}, "odd.weight is no parameter"),
        ({name: state[name][1:].contiguous()}, f"{name} has the shape"),
        ({name: state[name].long()}, f"{name} has the dtype I64"),
    ):
        reply = send(running, "v1", tensors)
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]
    assert HTTP.put(f"{running.url}/v1/weights/v1", content=b"no tensors").status_code == 400
    assert send(running, "v2", rest).status_code == 409
    assert send(running, "v1", rest).status_code == 200
    assert "comes twice" in send(running, "v1", rest).json()["error"]["message"]
    reply = take(running, "v1")
    assert reply.status_code == 400 and f"{name} is missing" in reply.json()["error"]["message"]
    reply = sent(running, "v3", state | {name: torch.full_like(state[name], torch.nan)})
    assert reply.status_code == 400 and f"{name} is not finite" in reply.json()["error"]["message"]
    assert drawn_by(running) == before
    assert sent(running, "v4", state).status_code == 200


def test_a_connection_that_ends_in_a_part_leaves_the_old_weights(running):
    state, before = other(14), drawn_by(running)
    names = sorted(state)
    assert begin(running, "v1").status_code == 200
    assert send(running, "v1", {name: state[name] for name in names[:3]}).status_code == 200
    data = save({name: state[name] for name in names[3:]})
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as cut:
        head = f"PUT /v1/weights/v1 HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
        cut.sendall(head.encode() + data[: len(data) // 2])
    assert drawn_by(running) == before
    reply = take(running, "v1")
    assert reply.status_code == 400 and "missing" in reply.json()["error"]["message"]
    assert send(running, "v1", {name: state[name] for name in names[3:]}).status_code == 200
    assert take(running, "v1").status_code == 200
    assert drawn_alone(state) == without_versions(drawn_by(running))


def test_requests_under_load_have_the_tokens_of_their_versions(running):
    states = {"old": other(15), "new": other(16)}
    alone = {version: Generator(module_of(state)) for version, state in states.items()}
    assert sent(running, "old", states["old"]).status_code == 200
    for on_update in ("finish", "continue", "restart"):
        prompts = [[97 + number, 98, 99] for number in range(3)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(drawn_by, running, prompts=[prompt], max_tokens=60) for prompt in prompts]
            wait_until(lambda: running.generator.has_work)
            version = "old" if running.generator.version == "new" else "new"
            assert sent(running, version, states[version], on_update=on_update).status_code == 200
            answers = [one.result()[0] for one in asked]
        for prompt, (tokens, logprobs, versions) in zip(prompts, answers, strict=True):
            assert len(versions) == 1 or on_update == "continue"
            place = 0
            for run in versions:  # each run of tokens is the greedy one of its version after all tokens before
                own = slice(place, place + run["tokens"])
                sampling = SamplingParams(max_tokens=run["tokens"], temperature=0, vocabulary=128)
                [[expected]] = alone[run["version"]].generate([[*prompt, *tokens[:place]]], sampling=sampling)
                assert expected.tokens == tokens[own]
                assert expected.logprobs.tolist() == pytest.approx(logprobs[own], rel=1e-6)
                place = own.stop
            assert place == len(tokens) == 60


@pytest.mark.parametrize("on_update", ["finish", "continue"])
def test_requests_are_answered_while_new_weights_are_read(tmp_path, on_update):
    """A request that begins and ends between the beginning and the end of the reading."""
    opened, reads, gate = tiny(tokenizer=Bytes()), threading.Event(), threading.Event()
    expected = Expected.of(opened)

    @contextmanager
    def slowly(folder):
        reads.set()
        assert gate.wait(60)
        with expected.opened(folder) as source:
            yield source

    incoming, state = Incoming(expected, folder=str(tmp_path)), other(17)
    running = start(opened=opened, incoming=incoming, open_weights=slowly)
    try:
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(sent, running, "v1", state, on_update=on_update)
            assert reads.wait(60)
            assert [versions for *_, versions in drawn_by(running)] == [None] * len(PROMPTS)
            gate.set()
            assert taken.result().status_code == 200
        assert drawn_alone(state) == without_versions(drawn_by(running))
    finally:
        gate.set()
        running.stop()


def module_of(state):
    module = tiny(tokenizer=Bytes()).module
    module.load_state_dict(state, strict=False)
    return module


def outputs_of_loop(*, on_update, states, can_restart=True):
    """Tokens of one answer by version, and of a later request, if the update comes after its third token. Between them, new beginnings."""

    @contextmanager
    def open_weights(folder):
        yield UnreadModel(module=module_of({}), state=states[folder])

    generator = Generator(module_of(states["old"]), open_weights=open_weights)
    loop = EngineLoop(generator, max_waiting=4)

    async def drawn() -> list:
        outbox, update = Outbox(), Update(take=lambda: generator.switch("new", version="new"), on_update=on_update)

        def mask(answer):  # called by the engine's thread, in a step
            if len(answer) == 3 and not update.done.done():
                loop.update(update)
                loop.submit(Job(prompt=[98], sampling=SamplingParams(max_tokens=2), outbox=outbox, number=1))
            return torch.ones(300, dtype=torch.bool)

        sampling = SamplingParams(max_tokens=8, temperature=0, token_mask=mask)
        loop.submit(Job(prompt=[97], sampling=sampling, outbox=outbox, can_restart=can_restart))
        found, ended = [], 0
        while ended < 2:
            for number, item in await outbox.take():
                found.append((number, type(item).__name__ if isinstance(item, Restarted) else item.version))
                ended += isinstance(item, Output) and item.finished
        return found

    try:
        return asyncio.run(drawn())
    finally:
        loop.stop(drain_seconds=0)


@pytest.mark.parametrize("on_update", list(OnUpdate))
def test_a_request_under_way_finishes_goes_on_or_begins_again(on_update):
    found = outputs_of_loop(on_update=on_update, states={"old": other(15), "new": other(16)})
    assert [version for number, version in found if number == 1] == ["new"] * 2
    assert [version for number, version in found if number == 0] == {
        OnUpdate.finish: [None] * 8,
        OnUpdate.continue_: [None] * 4 + ["new"] * 4,
        OnUpdate.restart: [None] * 4 + ["Restarted"] + ["new"] * 8,
    }[on_update]


def test_a_streamed_request_goes_on_and_has_versions(running):
    states = {"old": other(15), "new": other(16)}
    found = outputs_of_loop(on_update=OnUpdate.restart, states=states, can_restart=False)
    assert [version for number, version in found if number == 0] == [None] * 4 + ["new"] * 4
    assert sent(running, "v1", states["new"]).status_code == 200
    body = {"prompt": PROMPTS[0], "max_tokens": 4, "stream": True, "return_token_ids": True}
    lines = HTTP.post(f"{running.url}/v1/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    versions = [run for chunk in chunks for choice in chunk["choices"] for run in choice["versions"]]
    assert versions == [{"version": "v1", "tokens": 1}] * 4


def test_the_endpoint_is_off_by_default_and_needs_the_key(tmp_path):
    running = start(tokenizer=Bytes())
    try:
        reply = begin(running, "v1")
        assert reply.status_code == 404 and "serve.weights_path=FOLDER" in reply.json()["error"]["message"]
    finally:
        running.stop()
    running = taking(tmp_path, policy=replace(ServePolicy(), api_key="secret"))
    try:
        for method, path in (("GET", ""), ("POST", ""), ("PUT", "/v1"), ("POST", "/v1")):
            assert HTTP.request(method, f"{running.url}/v1/weights{path}").status_code == 401
        bearer = {"Authorization": "Bearer secret"}
        assert HTTP.get(f"{running.url}/v1/weights", headers=bearer).json()["version"] is None
    finally:
        running.stop()


def test_parts_end_with_the_server_also_after_a_kill(tmp_path):
    expected = Expected.of(tiny(tokenizer=Bytes()))
    left = tmp_path / ".incoming-left"
    left.mkdir()
    first = Incoming(expected, folder=str(tmp_path))
    assert not left.exists()
    second = Incoming(expected, folder=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2  # a server that runs keeps its own
    first.close()
    second.close()
    assert not list(tmp_path.iterdir())
