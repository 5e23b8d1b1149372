"""`rollout.servers_api=vllm`: answers by a stub with the endpoints of vLLM 0.32, which computes with the weights that it reads."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hf.policies import config_of, save_policy
from tests.hf.test_dpo import plain
from tests.rl.rollout.runs import play, rows_of
from ztk.config import ConfigError, Machine, compose
from ztk.inference import SamplingParams
from ztk.rl.rollout import Fleet, ServerFault, ServersLost
from ztk.rl.rollout.clients import Channel
from ztk.rl.rollout.served import draw_by
from ztk.rl.rollout.vllm import VllmClient

VOCABULARY, STOP = 10, 9


def counted(asked):
    """Tokens that name the seed and the length of the prompt."""
    for number in range(asked["n"]):
        yield [(asked["seed"] + number) % 8, len(asked["prompt"]) % 8], [-1.0, -2.0], "length"


class Stub(ThreadingHTTPServer):
    """A vLLM server. draw: yields tokens, log-probabilities and reason. changed: changes a reply, or returns the status of an error.

    calls: paths in order. label: version of the weights, lost by a restart. folders: weights that were read.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *, draw=counted, changed=lambda stub, path, reply: None, mode="processed_logprobs", missing=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.draw, self.changed, self.mode, self.missing = draw, changed, mode, missing
        self.label, self.calls, self.folders, self.asked, self.lock = "default", [], [], [], threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def reply(self, path, body):
        """The documented reply to a request."""
        match path:
            case "/v1/models":
                return {"object": "list", "data": [{"id": "policy", "max_model_len": 64}]}
            case "/server_info":
                return {"vllm_config": {"model_config": {"logprobs_mode": self.mode}}}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/pause" | "/resume":
                return {"status": path[1:]}
            case "/reset_prefix_cache":
                return {"success": True}
            case "/update_weight_version":
                self.label = body["new_version"]
                return {"success": True, "new_version": self.label}
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                self.folders.append(Path(body["kwargs"]["weights_path"]))
                return {"results": [None]}
            case "/v1/completions":
                self.asked.append(body)
                return {"object": "text_completion", "choices": [*self.choices(body)]}

    def choices(self, body):
        for index, (tokens, logprobs, reason) in enumerate(self.draw(body)):
            own = {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": logprobs}
            shared = {"index": index, "text": "", "finish_reason": reason, "stop_reason": None}
            yield shared | {"token_ids": tokens, "prompt_token_ids": body["prompt"], "logprobs": own}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *given):
        pass

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        stub, path = self.server, urlsplit(self.path).path
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with stub.lock:
            stub.calls.append(path)
            reply = None if path in stub.missing else stub.reply(path, json.loads(raw) if raw else None)
        status = 404 if reply is None else stub.changed(stub, path, reply) or 200
        data = json.dumps(reply if status == 200 else {"error": {"message": "odd"}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def fleet_of(*stubs, tmp_path, patience=30.0):
    clients = [VllmClient(Channel(stub.url, seconds=patience), vocabulary=VOCABULARY) for stub in stubs]
    names = {"key": "rollout.servers", "wait_key": "rollout.servers_wait"}
    fleet = Fleet(clients, sends=True, patience_seconds=patience, **names)
    save_file({"w": torch.zeros(2)}, tmp_path / "0.safetensors")
    try:
        fleet.publish("v1", weights=tmp_path)
        yield fleet
    finally:
        fleet.close()
        for stub in stubs:
            stub.shutdown()
            stub.server_close()


PROMPTS = [[number // 4] * (1 + number // 4) for number in range(16)]  # four answers to each prompt
KEYS = [number // 4 * 4 + number for number in range(16)]
EXPECTED = [[(KEYS[row // 4 * 4] + row % 4) % 8, len(prompt)] for row, prompt in enumerate(PROMPTS)]


def drawn_by(fleet):
    sampling = [SamplingParams(max_tokens=2, draw_key=key, stop_token_ids=(STOP,), temperature=0.5) for key in KEYS]
    return draw_by(fleet, prompts=PROMPTS, sampling=sampling)


def test_answers_have_tokens_log_probabilities_and_versions(tmp_path):
    stub = Stub()
    with fleet_of(stub, tmp_path=tmp_path) as fleet:
        found = drawn_by(fleet)
        assert [one.tokens for one in found] == EXPECTED
        assert all(one.processed_logprobs.tolist() == [-1, -2] and one.versions == ["v1", "v1"] for one in found)
        fleet.publish("v2", weights=tmp_path)
        assert {version for one in drawn_by(fleet) for version in one.versions} == {"v2"}
        assert fleet.sent_bytes == 2 * (tmp_path / "0.safetensors").stat().st_size
    order = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert [path for path in stub.calls if path in order] == order * 2
    assert stub.folders == [tmp_path, tmp_path]
    asked = {
        name: stub.asked[0][name] for name in ("model", "n", "temperature", "max_tokens", "stop_token_ids", "logprobs")
    }
    assert asked == {
        "model": "policy",
        "n": 4,
        "temperature": 0.5,
        "max_tokens": 2,
        "stop_token_ids": [STOP],
        "logprobs": 0,
    }


def first(count, *, on, then):
    """The first replies of a path are changed."""
    left = iter(range(count))

    def changed(stub, path, reply):
        if path == on and next(left, None) is not None and isinstance(status := then(stub, reply), int):
            return status
        return None

    return changed


def restarts(stub, reply):
    stub.label = "default"


DRAW = "/v1/completions"
PASSING = {
    "error": (DRAW, lambda stub, reply: 500),
    "stopped engine": (DRAW, lambda stub, reply: 503),
    "full": (DRAW, lambda stub, reply: 429),
    "restarted": (DRAW, restarts),
    "aborted": (DRAW, lambda stub, reply: reply["choices"][0].update(finish_reason="abort")),
    "answer missing": (DRAW, lambda stub, reply: reply["choices"].pop()),
    "weights not read": ("/collective_rpc", lambda stub, reply: 500),
    "cache kept": ("/reset_prefix_cache", lambda stub, reply: reply.update(success=False)),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_loses_no_prompt(tmp_path, name):
    on, then = PASSING[name]
    stub = Stub(changed=first(1, on=on, then=then))
    with fleet_of(stub, tmp_path=tmp_path) as fleet:
        assert [one.tokens for one in drawn_by(fleet)] == EXPECTED
    assert stub.label == "v1"


def test_a_server_that_hangs_is_replaced(tmp_path):
    gone, hung = threading.Event(), iter(range(1))

    def hang(stub, path, reply):
        if path == DRAW and next(hung, None) is not None:
            gone.wait(60)

    with fleet_of(Stub(changed=hang), Stub(changed=hang), tmp_path=tmp_path, patience=12.0) as fleet:
        assert [one.tokens for one in drawn_by(fleet)] == EXPECTED
        gone.set()


def with_choice(**changes):
    return lambda stub, path, reply: reply["choices"][0].update(changes) if path == DRAW else None


def with_logprobs(**changes):
    return lambda stub, path, reply: reply["choices"][0]["logprobs"].update(changes) if path == DRAW else None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (with_choice(logprobs=None), "without token_ids or logprobs"),
        (with_choice(token_ids=None), "without token_ids or logprobs"),
        (with_choice(prompt_token_ids=[1, 2, 3, 4, 5, 6]), "another prompt"),
        (with_logprobs(tokens=["token_id:4", "token_id:5"]), "log-probabilities of .*token_id:4"),
        (with_logprobs(tokens=["a", "b"]), "log-probabilities of"),
        (with_logprobs(token_logprobs=[-1.0]), "log-probabilities of"),
        (with_logprobs(token_logprobs=[-1.0, None]), "the log-probabilities .*None"),
        (with_logprobs(token_logprobs=[-1.0, 0.5]), "the log-probabilities .*0.5"),
        (with_choice(finish_reason="stop"), "by others than the tokens"),
    ],
)
def test_answers_that_cannot_be_trained_on_are_named(tmp_path, changed, words):
    with fleet_of(Stub(changed=changed), tmp_path=tmp_path) as fleet, pytest.raises(ServerFault, match=words):
        drawn_by(fleet)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([3, VOCABULARY], "below 10, so its model is another"),
        ([1, 2, 3], "the most are 2"),
        ([STOP, 1], "by others than"),
        ([1], "max-model-len"),
    ],
)
def test_tokens_of_another_model_are_named(tmp_path, tokens, words):
    stub = Stub(draw=lambda asked: [(tokens, [-1.0] * len(tokens), "length")] * asked["n"])
    with fleet_of(stub, tmp_path=tmp_path) as fleet, pytest.raises(ServerFault, match=words):
        drawn_by(fleet)


def test_servers_that_cannot_draw_for_a_trainer_are_named(tmp_path):
    stub = Stub(mode="raw_logprobs")
    with fleet_of(stub, tmp_path=tmp_path) as fleet, pytest.raises(ServerFault, match="--logprobs-mode processed"):
        drawn_by(fleet)
    stub = Stub(missing=("/weight_info",))
    with fleet_of(stub, tmp_path=tmp_path) as fleet, pytest.raises(ServerFault, match="VLLM_SERVER_DEV_MODE=1.*0.30"):
        drawn_by(fleet)


def test_without_a_server_the_run_ends_with_the_reasons(tmp_path):
    stub = Stub(changed=lambda stub, path, reply: 503 if path == DRAW else None)
    with (
        fleet_of(stub, tmp_path=tmp_path, patience=2.0) as fleet,
        pytest.raises(ServersLost, match="none has answered for 2 s"),
    ):
        drawn_by(fleet)


class Sampler:
    """Draws with the newest weights of a stub, by torch's forward and random numbers."""

    def __init__(self, folder):
        self.model, self.read = plain(folder).eval(), 0

    def __call__(self, asked):
        folders = self.stub.folders
        if self.read < len(folders):
            self.read = len(folders)
            state = {
                name: value for file in folders[-1].glob("*.safetensors") for name, value in load_file(file).items()
            }
            assert not self.model.load_state_dict(state, strict=False).unexpected_keys
        for number in range(asked["n"]):
            yield self.drawn(asked, draw=torch.Generator().manual_seed(asked["seed"] + number))

    @torch.no_grad()
    def drawn(self, asked, *, draw):
        tokens, logprobs = [], []
        while len(tokens) < asked["max_tokens"]:
            logits = self.model(input_ids=torch.tensor([asked["prompt"] + tokens])).logits[0, -1]
            values = torch.log_softmax(logits / asked["temperature"], dim=-1)
            tokens.append(int(torch.multinomial(values.exp(), 1, generator=draw)))
            logprobs.append(float(values[tokens[-1]]))
            if tokens[-1] in asked["stop_token_ids"]:
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_a_run_learns_with_the_weights_of_each_step(ranks, tmp_path, task):
    folder = save_policy(tmp_path / "policy")
    sampler = Sampler(folder)
    stub = sampler.stub = Stub(draw=sampler)
    options = (f"rollout.servers=[{stub.url}]", "rollout.servers_api=vllm", "rollout.temperature=0.7")
    config = config_of(task, *options, "rollout.stop_truncated_above=null", folder=folder, to=tmp_path / "run")
    ranks(2).run(play, config=config)
    stub.shutdown()
    stub.server_close()
    rows = rows_of(tmp_path / "run")
    assert config.rollout.identity == "corrected" and len(rows) == 4
    assert all(
        abs(row["rollout_k1"]) < 1e-5 and row["rollout_k3"] < 1e-8 and row["rollout_outside"] == 0 for row in rows
    )
    assert len(stub.folders) == len(set(stub.folders)) >= 2 and not any(own.exists() for own in stub.folders)


def test_keys_that_vllm_cannot_follow_are_refused(tmp_path):
    given = ("task=grpo", "launch.device=cpu", "rollout.servers=[http://a:8000]", "rollout.servers_api=vllm")
    odd = ("rollout.identity=exact", "rollout.top_p=0.9")
    with pytest.raises(ConfigError) as refused:
        compose(*given, *odd, output_dir=tmp_path, machine=Machine(gpus=0, cores=2))
    words = ("rollout.identity=exact with rollout.servers_api=vllm", "use rollout.top_p=1", "use model=hf")
    assert all(word in str(refused.value) for word in words)
