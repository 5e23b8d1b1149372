"""`rollout.servers`: servers draw with the weights of each step, and the run has the losses of one that draws by itself."""

import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from tests.rl.rollout.runs import config_of, play, rows_of
from tests.rl.rollout.test_environments import LONG
from tests.rl.rollout.test_layouts import SHORT
from tests.serve.test_server import start, wait_until
from ztk.config import ConfigError, Machine, compose
from ztk.core.policies.rollout import TransferName
from ztk.inference import SamplingParams
from ztk.nn import Decoder, DecoderConfig
from ztk.rl.rollout import Fleet, ServerFault, ServersLost
from ztk.rl.rollout.clients import Channel, ZtkClient
from ztk.rl.rollout.served import draw_by
from ztk.serve.app import ServePolicy
from ztk.serve.models import Opened
from ztk.serve.tokenizers import Bytes
from ztk.serve.weights import Expected, Incoming

EXACT = ("rollout.engine=generator", "rollout.identity=exact")
STALENESS = ("rollout_staleness", "rollout_staleness_max")
POWER, TCP_REPAIR = "power", 19  # an answer of a `Stub`; Linux' number of a socket option
NO_SIZES = ("name", "path", "init", "kernels")


@contextmanager
def served(config, *, folder, count=2, api_key=None):
    """Addresses of servers with other weights than the run's, below `folder`."""
    with ExitStack() as stack:
        urls = []
        for number in range(count):
            torch.manual_seed(number)
            given = vars(config.model).items()
            sizes = {name: value for name, value in given if name not in NO_SIZES and value is not None}
            module = Decoder(DecoderConfig(**sizes)).eval()
            opened = Opened(name="m", module=module, tokenizer=Bytes(), ends=(), vocabulary=256)
            expected = Expected.of(opened)
            given = {"incoming": Incoming(expected, folder=str(folder)), "open_weights": expected.opened}
            running = start(opened=opened, policy=ServePolicy(api_key=api_key), **given)
            stack.callback(running.stop)
            urls.append(running.url)
        yield urls


@pytest.mark.parametrize(
    ("task", "words", "count", "stage", "transfer"),
    [
        ("grpo", EXACT, 2, 3, "http"),
        ("ppo", ("rollout.staleness=1",), 1, 0, "gloo"),
        ("grpo", (*EXACT, "rollout.top_k=40", "rollout.top_p=0.9", "rollout.min_p=0.01"), 1, 0, "folder"),
    ],
    ids=["grpo", "ppo ahead", "cut"],
)
def test_losses_are_those_of_a_run_that_draws_by_itself(ranks, tmp_path, task, words, count, stage, transfer):
    config = config_of(task, *words, folder=tmp_path / "own", ranks=count, zero__stage=stage)
    ranks(count).run(play, config=config)
    with served(config, folder=tmp_path) as urls:
        where = {"rollout__servers": urls, "rollout__servers_wait": 60.0}
        where |= {"rollout__servers_transfer": TransferName(transfer)}
        other = config_of(task, *words, folder=tmp_path / "served", ranks=count, zero__stage=stage, **where)
        ranks(count).run(play, config=other)
    rows, ahead = rows_of(tmp_path / "served"), "rollout.staleness=1" in words
    assert [row["rollout_staleness"] for row in rows] == ([0, 0, 1, 1] if ahead else [0] * 4)
    own = rows_of(tmp_path / "own")
    assert rows == own if ahead else [without(row, *STALENESS) for row in rows] == own
    assert all(("rollout_k3" in row) == ahead and (ahead or row["rollout_differing"] == 0) for row in rows)
    assert not (tmp_path / "served" / "served_weights").exists()


@pytest.mark.parametrize(
    ("topology", "more"), [("tp2", ("zero=stage3",)), ("pp2", ()), ("dp", ("zero=stage3", "lora=adapter"))]
)
def test_servers_pull_parts_of_a_divided_or_adapted_model_and_give_the_same_answers(ranks, tmp_path, topology, more):
    words = (*SHORT, *more, f"topology={topology}")
    config = config_of("grpo", *words, "rollout.identity=corrected", folder=tmp_path / "own", ranks=2)
    ranks(2).run(play, config=config)
    with served(config, folder=tmp_path) as urls:
        where = {"rollout__servers": urls, "rollout__servers_wait": 60.0}
        words += ("rollout.servers=[http://a:8000]", "rollout.servers_transfer=gloo")
        other = config_of("grpo", *words, folder=tmp_path / "served", ranks=2, **where)
        found = ranks(2).run(play, config=other)
    assert topology == "dp" or all(rank["rollouts"] == found[0]["rollouts"] for rank in found)
    for own, row in zip(rows_of(tmp_path / "own"), rows_of(tmp_path / "served"), strict=True):
        assert row["reward"] == own["reward"] and row["loss"] == pytest.approx(own["loss"], rel=1e-4, abs=1e-5)
        assert row["rollout_staleness_max"] == 0 and row["rollout_k3"] < 1e-8


@pytest.mark.parametrize("words", [EXACT, ("rollout.staleness=1",)], ids=["exact", "ahead"])
def test_turns_of_an_environment_are_those_of_a_run_that_draws_by_itself(ranks, tmp_path, words):
    given = (*words, "rollout.environment=tests.rl.rollout.played:Twice", *LONG)
    options = {"rollout__stop_truncated_above": None, "reward__function": None}

    def config(name, **more):
        found = config_of("grpo", *given, folder=tmp_path / name, **options, **more)
        found.reward.function = None
        return found

    ranks(1).run(play, config=config("own"))
    with served(config("own"), folder=tmp_path) as urls:
        where = {"rollout__servers": urls, "rollout__servers_wait": 60.0}
        ranks(1).run(play, config=config("served", **where))
    rows = [without(row, *STALENESS) for row in rows_of(tmp_path / "served")]
    assert rows == [without(row, *STALENESS) for row in rows_of(tmp_path / "own")]
    assert all(row["turns"] > 1 for row in rows)


def test_two_rollouts_ahead_have_tokens_of_their_versions_and_a_resumed_run_goes_on(ranks, tmp_path):
    options = {"ranks": 2, "train__steps": 8, "rollout__servers_wait": 60.0}
    config = config_of("grpo", folder=tmp_path / "a", ranks=2)
    with served(config, folder=tmp_path) as urls:
        options |= {"rollout__servers": urls}
        words = ("rollout.staleness=2", "rollout.servers=[http://a:8000]")
        config = config_of("grpo", *words, folder=tmp_path / "a", checkpoint__every=4, **options)
        ranks(2).run(play, config=config)
        saved = str(tmp_path / "a" / "checkpoints" / "step-000004")
        ranks(2).run(play, config=config_of("grpo", *words, folder=tmp_path / "b", checkpoint__resume=saved, **options))
    for rows in (rows_of(tmp_path / "a"), rows_of(tmp_path / "b")):
        last = rows[-1]
        assert 0 < last["rollout_staleness"] <= last["rollout_staleness_max"] <= 2
        assert last["rollout_k3"] > 0 and last["step"] == 8
    assert [row["rollout_staleness_max"] for row in rows_of(tmp_path / "a")[:4]] == [0, 0, 1, 1]


def without(row, *names):
    return {own: value for own, value in row.items() if own not in names}


class Stub(ThreadingHTTPServer):
    """A server that answers [key, length of the prompt], with the faults of a test. asked: prompts that came."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *, parameters=None, answers=lambda server: True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.version, self.answers, self.asked, self.lock = None, answers, [], threading.Lock()
        self.parameters, self.begun, self.taken = parameters or {"w": [2]}, None, []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *given):
        pass

    def reply(self, body, *, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def lose_power(self):
        """Ends the connection without a packet."""
        self.connection.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        os.close(self.connection.detach())

    def do_GET(self):
        self.reply({"version": self.server.version, "parameters": self.server.parameters})

    def do_PUT(self):
        self.body()
        self.reply({})

    def do_POST(self):
        server, raw = self.server, self.body()
        if self.path == "/v1/weights":
            server.begun = json.loads(raw)["version"]
            return self.reply({})
        if self.path.startswith("/v1/weights/"):
            server.version = server.begun
            server.taken.append(server.begun)
            return self.reply({})
        asked = json.loads(raw)
        with server.lock:
            server.asked.append(asked["prompt"])
        version = server.version
        answer = server.answers(server)
        if answer == POWER:
            return self.lose_power()
        if answer is not True:
            return self.reply({"error": {"message": "odd"}}, status=answer) if answer else None
        choices = []
        for number, (prompt, key) in enumerate(zip(asked["prompt"], asked["draw_keys"], strict=True)):
            values = {"token_logprobs": [-1.0, -2.0], "processed_token_logprobs": [-1.5, -2.5]}
            found = {"index": number, "token_ids": [key, len(prompt)], "finish_reason": "length", "logprobs": values}
            runs = [{"version": own, "tokens": 1} for own in (version, server.version)]
            choices.append(found | ({} if version is None else {"versions": runs}))
        return self.reply({"choices": choices})


@contextmanager
def rank_of(*stubs, tmp_path, patience=30.0, sends=True):
    """The fleet of a rank. sends: whether it is rank 0."""
    channels = [Channel(stub.url, seconds=patience) for stub in stubs]
    clients = [ZtkClient(channel, parameters={"w": (2,)}) for channel in channels]
    names = {"key": "rollout.servers", "wait_key": "rollout.servers_wait"}
    fleet = Fleet(clients, sends=sends, patience_seconds=patience, **names)
    (tmp_path / "0.safetensors").write_bytes(b"values")
    try:
        fleet.publish("v1", weights=tmp_path)
        yield fleet
    finally:
        fleet.close()


@contextmanager
def fleet_of(*stubs, **options):
    try:
        with rank_of(*stubs, **options) as fleet:
            yield fleet
    finally:
        for stub in stubs:
            stub.shutdown()
            stub.server_close()


PROMPTS = [[number // 4] * (1 + number // 4) for number in range(48)]  # four answers to each prompt


def drawn_by(fleet):
    sampling = [SamplingParams(max_tokens=2, draw_key=key) for key in range(len(PROMPTS))]
    return [answer.tokens for answer in draw_by(fleet, prompts=PROMPTS, sampling=sampling)]


EXPECTED = [[key, len(prompt)] for key, prompt in enumerate(PROMPTS)]


def test_answers_are_in_order_and_a_prompt_goes_to_one_server_again(tmp_path):
    stubs = Stub(), Stub()
    with fleet_of(*stubs, tmp_path=tmp_path) as fleet:
        assert drawn_by(fleet) == EXPECTED
        assert all(stub.taken == ["v1"] for stub in stubs if stub.asked)
        homes = [{tuple(prompts[0]) for prompts in stub.asked} for stub in stubs]
        fleet.publish("v2", weights=tmp_path)
        assert drawn_by(fleet) == EXPECTED
    assert not homes[0] & homes[1] and len(homes[0] | homes[1]) == 12


def first(count, *, then):
    """The first answers of a server fail in a way; `then` are right ones."""
    left = iter(range(count))

    def answers(server):
        with server.lock:
            return then(server) if next(left, None) is not None else True

    return answers


def forgets(server):
    """Restarts with the weights of its folder: the answer has none of this run's."""
    server.version = None
    return True


@pytest.mark.parametrize(
    "fault",
    [lambda server: False, lambda server: 500, lambda server: 503, lambda server: 429, forgets],
    ids=["dies", "fails", "stops", "is full", "restarts"],
)
def test_a_server_that_fails_loses_no_prompt_and_comes_back(tmp_path, fault):
    stubs = Stub(answers=first(2, then=fault)), Stub()
    with fleet_of(*stubs, tmp_path=tmp_path) as fleet:
        for _ in range(3):
            assert drawn_by(fleet) == EXPECTED
        deadline = time.monotonic() + 30
        while stubs[0].version != "v1":
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="ending a connection without a packet needs root")
def test_the_only_server_is_asked_again_after_its_machine_lost_its_power(tmp_path):
    stub, patience = Stub(answers=first(1, then=lambda server: POWER)), 60.0
    with fleet_of(stub, tmp_path=tmp_path, patience=patience) as fleet:
        began = time.monotonic()
        assert drawn_by(fleet) == EXPECTED
        assert time.monotonic() - began < patience / 2


def test_a_server_that_moves_is_found_at_its_new_address(tmp_path):
    stubs, places = (Stub(), Stub()), []

    def find():
        if not places:
            raise ConnectionError("Ray has not placed it")
        return places[-1].url

    names = {"key": "rollout.servers", "wait_key": "rollout.servers_wait"}
    client = ZtkClient(Channel("ray 0", seconds=30.0, find=find), parameters={"w": (2,)})
    fleet = Fleet([client], sends=True, patience_seconds=30.0, **names)
    (tmp_path / "0.safetensors").write_bytes(b"values")
    try:
        fleet.publish("v1", weights=tmp_path)
        with ThreadPoolExecutor(1) as pool:
            drawn = pool.submit(drawn_by, fleet)
            wait_until(lambda: "Ray has not placed it" in fleet._servers[0].error)
            places.append(stubs[0])
            assert drawn.result(30) == EXPECTED
            places.clear()
            drawn = pool.submit(drawn_by, fleet)
            places.append(stubs[1])
            assert drawn.result(30) == EXPECTED and stubs[1].taken == ["v1"]
    finally:
        fleet.close()


def test_a_server_that_restarts_once_rank_0_has_its_answers_gets_the_weights_again(tmp_path):
    stub = Stub()
    with fleet_of(stub, tmp_path=tmp_path) as leading, rank_of(stub, tmp_path=tmp_path, sends=False) as other:
        assert drawn_by(leading) == EXPECTED
        stub.version = None  # rank 0 makes no request before rank 1 has its answers
        assert drawn_by(other) == EXPECTED


def test_answers_under_way_go_on_with_newer_weights_and_have_the_version_of_each_token(tmp_path):
    gate = threading.Event()
    stub = Stub(answers=lambda server: gate.wait(60))
    with fleet_of(stub, tmp_path=tmp_path) as fleet, ThreadPoolExecutor(2) as pool:
        earlier = pool.submit(draw_by, fleet, prompts=[[1]], sampling=[SamplingParams(draw_key=7)], oldest="v1")
        wait_until(lambda: len(stub.asked) == 1)
        fleet.publish("v2", weights=tmp_path)
        wait_until(lambda: stub.version == "v2")
        later = pool.submit(draw_by, fleet, prompts=[[2]], sampling=[SamplingParams(draw_key=8)])
        wait_until(lambda: len(stub.asked) == 2)
        gate.set()
        [answer], [other] = earlier.result(30), later.result(30)
    assert (answer.tokens, answer.versions) == ([7, 1], ["v1", "v2"])
    assert (other.tokens, other.versions) == ([8, 1], ["v2", "v2"])


def test_an_answer_by_older_weights_than_allowed_is_drawn_again(tmp_path):
    stub = Stub()
    stub.answers = first(1, then=lambda server: setattr(server, "version", "v1") or True)
    with fleet_of(stub, tmp_path=tmp_path) as fleet:
        wait_until(lambda: stub.version == "v1")
        fleet.publish("v2", weights=tmp_path)
        assert drawn_by(fleet) == EXPECTED
    assert stub.taken == ["v1", "v2", "v2"]


def test_a_server_that_sends_no_kept_tokens_is_named(tmp_path):
    words, sampling = "does not send the tokens that rollout.top_k", [SamplingParams(top_k=5)]
    with fleet_of(Stub(), tmp_path=tmp_path) as fleet, pytest.raises(ServerFault, match=words):
        draw_by(fleet, prompts=[[1]], sampling=sampling)


def test_a_server_that_hangs_is_replaced(tmp_path):
    gone = threading.Event()
    stubs = Stub(answers=lambda server: gone.wait(60)), Stub()
    with fleet_of(*stubs, tmp_path=tmp_path) as fleet:
        while not stubs[0].asked:
            assert drawn_by(fleet) == EXPECTED
        gone.set()


def test_without_a_server_the_run_ends_with_the_reasons(tmp_path):
    words, stub = r"none has answered for 4 s \(http://127.*RemoteDisconnected", Stub(answers=lambda server: False)
    with fleet_of(stub, tmp_path=tmp_path, patience=4.0) as fleet, pytest.raises(ServersLost, match=words):
        drawn_by(fleet)


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        ({"parameters": {"w": [3]}}, r"has another model: w is \(3,\) there and \(2,\) here"),
        ({"answers": lambda server: 400}, "400 odd"),
        ({"answers": lambda server: 500}, "cannot compute: .*500 odd"),
    ],
    ids=["another model", "refusal", "failures"],
)
def test_a_server_that_cannot_draw_is_named(tmp_path, stub, words):
    with fleet_of(Stub(**stub), tmp_path=tmp_path) as fleet, pytest.raises(ServerFault, match=words):
        drawn_by(fleet)


def test_what_servers_cannot_do_is_refused(tmp_path):
    given = ("task=grpo", "launch.device=cpu", "launch.ranks=2")
    odd = ("rollout.servers=[a:8000]", "topology=tp2", "rollout.staleness=1", "rollout.identity=exact")
    with pytest.raises(ConfigError) as refused:
        compose(*given, *odd, output_dir=tmp_path, machine=Machine(gpus=0, cores=2))
    for words in (
        "[a:8000]: must be addresses such as",
        "use rollout.servers_transfer=gloo",
        "use rollout.staleness=0, or",
        "rollout.staleness=1: answers are drawn with weights of earlier rollouts, so rollout.identity=exact cannot be promised",
    ):
        assert words in str(refused.value)
    exact = ("rollout.servers=[http://a:8000]", "rollout.identity=exact", "rollout.servers_transfer=gloo")
    with pytest.raises(
        ConfigError,
        match="topology.pipeline=2: servers divide .* use .* topology=tp2 with servers of topology.tensor=2",
    ):
        compose(*given, *exact, "topology=pp2", output_dir=tmp_path, machine=Machine(gpus=0, cores=2))
    with pytest.raises(ConfigError, match="Ray starts task=serve; name the addresses"):
        placed = ("rollout.servers=[ray,http://a:8000]", "rollout.servers_api=vllm")
        compose(*given, *placed, output_dir=tmp_path, machine=Machine(gpus=0, cores=2))
    with pytest.raises(ConfigError, match="servers have folders of their own; use http or gloo"):
        placed = ("rollout.servers=[ray]", "rollout.servers_transfer=folder")
        compose(*given, *placed, output_dir=tmp_path, machine=Machine(gpus=0, cores=2))
    with pytest.raises(ConfigError, match="rollout.engine=generator"):
        own = ("rollout.servers=[http://a:8000]", "rollout.engine=trainer")
        compose(*given, *own, output_dir=tmp_path, machine=Machine(gpus=0, cores=2))
