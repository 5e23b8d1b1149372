"""`reward.servers`: servers give the rewards of the model in process, and one that fails loses no answer."""

import json
import math
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn
from starlette.testclient import TestClient

from tests.experiments.test_alignment import config_of as config_of_pairs
from tests.experiments.test_alignment import play as play_pairs
from tests.rl.rollout.runs import alone, config_of, play, rows_of
from tests.rl.rollout.test_sources import SAVES, SHAPE
from ztk.config import ConfigError, Machine, compose, gives_rewards, to_yaml
from ztk.core.policies.reward import ScoreInput
from ztk.core.runtime import Process
from ztk.experiments.scoring import open_scorer
from ztk.experiments.served_rewards import ServedReward
from ztk.rl.rollout import ServerFault, ServersLost
from ztk.rl.rollout.rewards import Answered, TrainingState
from ztk.serve.app import ServePolicy
from ztk.serve.bodies import Limits
from ztk.serve.scores import ScoreServer

CPU = Machine(gpus=0, cores=2)


@contextmanager
def serving(app):
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def play_served(process: Process, *, config, folder: str):
    """A run whose rank asks a server of its own, with the model in `folder`."""
    serve = compose("task=serve", f"inference.model={folder}", "launch.device=cpu", output_dir="/run", machine=CPU)
    scorer = open_scorer(serve, process=alone(process))
    server = ScoreServer(scorer, name="reward", policy=ServePolicy(max_tokens=1))
    with serving(server.app) as url:
        config.reward.servers, config.reward.servers_wait = [url], 60.0
        config.reward.servers_input = ScoreInput.tokens
        found = play(process, config=config)
    server.stop()
    return found


def test_rewards_have_the_bits_of_the_model_in_process(ranks, tmp_path):
    first = tmp_path / "reward"
    pairs = config_of_pairs("reward", *SHAPE, *SAVES, "optimizer.lr=0.01", folder=first)
    ranks(2).run(play_pairs, configs=[pairs])
    (first / "config.yaml").write_text(to_yaml(pairs))
    assert gives_rewards(str(first))
    words = ("data.seq_len=16", "rollout.stop_equal_steps=null")
    config = config_of("grpo", *words, folder=tmp_path / "own", ranks=2, reward__path=str(first))
    ranks(2).run(play, config=config)
    config = config_of("grpo", *words, folder=tmp_path / "served", ranks=2)
    ranks(2).run(play_served, config=config, folder=str(first))
    rows = rows_of(tmp_path / "served")
    assert rows == rows_of(tmp_path / "own") and len({row["reward"] for row in rows}) > 1


class Stub(ThreadingHTTPServer):
    """A server whose score of a text is its length, with the faults of a test. asked: requests that came."""

    daemon_threads = True

    def __init__(self, *, changed=lambda stub, reply: None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.changed, self.asked, self.lock = changed, [], threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *given):
        pass

    def do_GET(self):
        self.reply({"data": [{"id": "reward"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/classify" and body["model"] == "reward" and body["use_activation"] is False
        with self.server.lock:
            self.server.asked.append(body)
        texts = body["input"] if "input" in body else [body["messages"][-1]["content"]]
        reply = {"data": [{"index": row, "probs": [float(len(text))]} for row, text in enumerate(texts)]}
        status = self.server.changed(self.server, reply) or 200
        self.reply(reply if status == 200 else {"error": {"message": "odd"}}, status=status)

    def reply(self, body, *, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def rewarded_by(*stubs, tmp_path, wait=30.0, form=ScoreInput.tokens):
    config = config_of("grpo", folder=tmp_path)
    config.reward.servers, config.reward.servers_wait = [stub.url for stub in stubs], wait
    config.reward.servers_input = form
    found = ServedReward(config)
    try:
        yield found
    finally:
        found.close()
        for stub in stubs:
            stub.shutdown()
            stub.server_close()


LENGTHS = torch.arange(1, 25)
ROWS: Any = SimpleNamespace(tokens=torch.ones(24, 32, dtype=torch.int64), lengths=LENGTHS)
NOTHING: Any = None


def values_of(model):
    return model.score(ROWS, answered=NOTHING, micro_batch=4).tolist()


def first(count, *, then):
    left = iter(range(count))
    return lambda stub, reply: then(reply) if next(left, None) is not None else None


@pytest.mark.parametrize(
    "then",
    [
        lambda reply: 500,
        lambda reply: 503,
        lambda reply: 429,
        lambda reply: reply["data"].pop() and None,
        lambda reply: reply["data"][0].update(probs=[math.nan]),
    ],
    ids=["fails", "stops", "is full", "one too few", "not a number"],
)
def test_a_server_that_fails_loses_no_answer(tmp_path, then):
    stubs = Stub(changed=first(2, then=then)), Stub()
    with rewarded_by(*stubs, tmp_path=tmp_path) as model:
        assert all(values_of(model) == LENGTHS.tolist() for _ in range(3))


def test_a_server_that_hangs_is_replaced(tmp_path):
    gone, hung = threading.Event(), iter(range(1))
    stubs = [
        Stub(changed=lambda stub, reply: next(hung, None) is not None and gone.wait(60) and None) for _ in range(2)
    ]
    with rewarded_by(*stubs, tmp_path=tmp_path, wait=12.0) as model:
        assert values_of(model) == LENGTHS.tolist()
        gone.set()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda stub, reply: 400, "400 odd"),
        (lambda stub, reply: reply["data"][0].update(probs=[0.1, 0.9]), "a model of 2 labels; start it with a reward"),
        (lambda stub, reply: reply["data"].pop() and None, "cannot compute: .* returned 3 scores for 4 texts"),
    ],
)
def test_a_server_that_cannot_score_is_named(tmp_path, changed, words):
    with rewarded_by(Stub(changed=changed), tmp_path=tmp_path) as model, pytest.raises(ServerFault, match=words):
        values_of(model)


def test_without_a_server_the_run_ends(tmp_path):
    stub = Stub(changed=lambda stub, reply: 503)
    words = "reward.servers: none has answered for 1 s .* raise reward.servers_wait"
    with rewarded_by(stub, tmp_path=tmp_path, wait=1.0) as model, pytest.raises(ServersLost, match=words):
        values_of(model)


def test_texts_and_conversations_are_sent_as_such(tmp_path):
    state = TrainingState(global_step=0, max_steps=1)
    records = [{"prompt": "ab"}, {"prompt": [{"role": "user", "content": "q"}]}]
    options = {"answers": ["cde", "fghi"], "token_ids": [[], []], "records": records, "is_chat": [False, True]}
    stub = Stub()
    with rewarded_by(stub, tmp_path=tmp_path, form=ScoreInput.text) as model:
        given = Answered(texts=["ab", "q"], state=state, **options)
        assert model.score(NOTHING, answered=given, micro_batch=4).tolist() == [5, 4]
        sent = [body.get("input", body.get("messages")) for body in stub.asked]
        assert ["abcde"] in sent
        assert [{"role": "user", "content": "q"}, {"role": "assistant", "content": "fghi"}] in sent
        records[1]["tools"] = [{"type": "function"}]
        with pytest.raises(ValueError, match="do not take the tools of a record; use reward.path"):
            model.score(NOTHING, answered=given, micro_batch=4)


class Lengths:
    """A scorer of bytes, whose values are lengths."""

    vocabulary, longest = 256, 8

    def tokens(self, text):
        if not isinstance(text, str):
            raise ValueError("inference.model=/m: has no chat template")
        return list(text.encode())

    def values(self, texts):
        return [float(len(one)) for one in texts]


def test_the_server_answers_in_the_format_of_vllm():
    policy = ServePolicy(api_key="k", max_tokens=1, limits=Limits(answers=2))
    client = TestClient(ScoreServer(Lengths(), name="reward", policy=policy).app, headers={"Authorization": "Bearer k"})
    asked = {"use_activation": False, "input": ["ab", [1, 2, 3]]}
    found = client.post("/classify", json=asked).json()
    assert [one["probs"] for one in found["data"]] == [[2.0], [3.0]] and found["usage"]["prompt_tokens"] == 5
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 8
    for changes, words in (
        ({"use_activation": True}, "use_activation=true"),
        ({"input": []}, "input must be"),
        ({"input": [[]]}, "input must be"),
        ({"input": [[1.5]]}, "input must be"),
        ({"input": [[256]]}, "none of the model's 256"),
        ({"input": "123456789"}, "send 1 to 8"),
        ({"input": ["a", "b", "c"]}, "takes 2 at a time"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no chat template"),
        ({"messages": ["a"]}, "list of objects"),
    ):
        reply = client.post("/classify", json=asked | changes)
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]
    assert client.post("/classify", json=asked, headers={"Authorization": "Bearer x"}).status_code == 401


def test_odd_keys_are_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        compose("task=grpo", "reward.servers=[a:8000]", f"reward.path={tmp_path}", output_dir=tmp_path, machine=CPU)
    words = ("reward.servers=[a:8000]: must be addresses", "leave one of the two out")
    assert all(word in str(refused.value) for word in words)
