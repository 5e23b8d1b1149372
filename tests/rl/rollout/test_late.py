"""`rollout.late=cut`: answers that the next update would wait for end with their tokens so far, and no prompt is lost."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file

from tests.rl.rollout.runs import config_of, play, rows_of
from tests.rl.rollout.test_environments import LONG
from tests.rl.rollout.test_served import NO_SIZES, Handler, Stub, fleet_of, served
from tests.serve.test_server import wait_until
from ztk.config import ConfigError, Machine, compose
from ztk.inference import SamplingParams
from ztk.nn import Decoder, DecoderConfig
from ztk.rl.rollout import Fleet
from ztk.rl.rollout.clients import LATE, Channel, ZtkClient
from ztk.rl.rollout.served import draw_by

AHEAD = ("rollout.staleness=1", "rollout.servers=[http://a:8000]", "rollout.late=cut")
WHOLE_SECONDS = 3.0  # until an answer of `Slow` goes on


class Streaming(Handler):
    """Answers with events, each of which is a list of (answer, tokens); None: the end of all answers."""

    def do_POST(self):
        if not self.path.endswith("/completions"):
            return super().do_POST()
        asked, server = json.loads(self.body()), self.server
        with server.lock:
            server.asked.append(asked["prompt"])
        if not asked["stream"]:
            rest = [(number, [65 + key % 20] * asked["max_tokens"]) for number, key in enumerate(asked["draw_keys"])]
            return self.reply({"choices": [self.choice(*one, ends=True) for one in rest]})
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for event in server.events(asked):
                ends = event is None
                rest = [(number, []) for number in range(len(asked["prompt"]))] if ends else event
                self.event({"choices": [self.choice(*one, ends=ends) for one in rest]})
            self.wfile.write(b"data: [DONE]\n\n")
            server.whole += 1
            return None
        server.left += 1
        return None

    def choice(self, number, tokens, *, ends):
        runs = [{"version": self.server.version, "tokens": len(tokens)}] if tokens else []
        values = [-1.0] * len(tokens)
        logprobs = {"token_logprobs": values, "processed_token_logprobs": values}
        found = {"index": number, "token_ids": tokens, "versions": runs, "logprobs": logprobs}
        return found | {"finish_reason": "length" if ends else None}

    def event(self, body):
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()


class StreamingStub(Stub):
    """events: a function from the request to the events. left, whole: numbers of streams that the client ended, and of others."""

    def __init__(self, events, **given):
        super().__init__(**given)
        self.RequestHandlerClass = Streaming
        self.events, self.left, self.whole = events, 0, 0


def test_late_answers_end_with_their_tokens_once_each_has_one(tmp_path):
    begun, goes_on = threading.Event(), threading.Event()

    def events(asked):
        yield [(0, [5]), (1, [])]
        yield [(0, [6, 7])]
        begun.set()
        goes_on.wait(60)
        yield [(1, [8])]
        while True:
            time.sleep(0.01)
            yield []

    stub, late = StreamingStub(events), threading.Event()
    sampling = [SamplingParams(max_tokens=9, draw_key=key) for key in range(2)]
    with fleet_of(stub, tmp_path=tmp_path) as fleet, ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(draw_by, fleet, prompts=[[1, 2]] * 2, sampling=sampling, late=late)
        assert begun.wait(30)
        late.set()
        with pytest.raises(TimeoutError):  # the second answer has no token
            drawn.result(0.5)
        goes_on.set()
        answers = drawn.result(30)
        wait_until(lambda: stub.left == 1)  # the server learns of it
    assert [(one.tokens, one.finish_reason) for one in answers] == [([5, 6, 7], LATE), ([8], LATE)]
    assert [one.versions for one in answers] == [["v1"] * 3, ["v1"]] and len(stub.asked) == 1


def test_a_stream_that_breaks_off_counts_for_nothing(tmp_path):
    left = iter([1])

    def events(asked):
        yield [(0, [5])]
        if next(left, None):
            raise OSError("dies")
        yield [(0, [6])]
        yield None

    with fleet_of(StreamingStub(events), tmp_path=tmp_path) as fleet:
        [answer] = draw_by(fleet, prompts=[[1]], sampling=[SamplingParams(max_tokens=2)], late=threading.Event())
    assert (answer.tokens, answer.finish_reason) == ([5, 6], "length")


@pytest.mark.parametrize("cut", [{}, {"top_k": 40, "top_p": 0.9}], ids=["all", "cut"])
def test_answers_of_a_stream_are_those_without_one_and_late_ones_begin_alike(tmp_path, cut):
    config = config_of("grpo", folder=tmp_path / "run")
    torch.manual_seed(7)
    sizes = {name: value for name, value in vars(config.model).items() if name not in NO_SIZES and value is not None}
    state = dict(Decoder(DecoderConfig(**sizes)).named_parameters())
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({name: value.detach() for name, value in state.items()}, folder / "0.safetensors")
    prompts = [[1, 2, 3]] * 5 + [[4, 5]] * 3
    sampling = [SamplingParams(max_tokens=7, draw_key=key, seed=3, fp32_logprobs=True, **cut) for key in range(8)]
    with served(config, folder=tmp_path, count=1) as [url]:
        client = ZtkClient(Channel(url, seconds=30.0), parameters={name: own.shape for name, own in state.items()})
        fleet = Fleet([client], sends=True, patience_seconds=30.0, key="rollout.servers", wait_key="servers_wait")
        fleet.publish("run-3", weights=folder)
        given = {"prompts": prompts, "sampling": sampling}
        whole, streamed = draw_by(fleet, **given), draw_by(fleet, **given, late=threading.Event())
        late = threading.Event()
        late.set()
        ended = draw_by(fleet, **given, late=late)
        fleet.close()
    for own, other, short in zip(whole, streamed, ended, strict=True):
        assert (own.tokens, own.finish_reason, own.versions) == (other.tokens, other.finish_reason, other.versions)
        assert torch.equal(own.processed_logprobs, other.processed_logprobs)
        count = len(short.tokens)
        assert 1 <= count <= len(own.tokens) and short.tokens == own.tokens[:count]
        assert torch.equal(short.processed_logprobs, own.processed_logprobs[:count])
        assert (short.finish_reason == LATE) == (count < len(own.tokens))
        assert own.kept is None or all(
            (torch.equal(one, same) and torch.equal(same, again)) or number >= count
            for number, (one, same, again) in enumerate(
                zip(own.kept, other.kept, [*short.kept, *own.kept[count:]], strict=True)
            )
        )
    assert any(one.finish_reason == LATE for one in ended)


def slow(asked):
    """Two tokens, and the others after the next update must have come to wait for them."""
    drawn = [(number, [65 + key % 20]) for number, key in enumerate(asked["draw_keys"])]
    yield [(number, 2 * token) for number, token in drawn]
    until = time.monotonic() + WHOLE_SECONDS
    while time.monotonic() < until:
        time.sleep(0.01)
        yield []
    yield [(number, token * (asked["max_tokens"] - 2)) for number, token in drawn]
    yield None


@pytest.mark.parametrize(
    "words", [(), ("rollout.environment=tests.rl.rollout.played:Twice", *LONG)], ids=["answers", "turns"]
)
def test_a_run_cuts_late_answers_loses_no_prompt_and_goes_on_alike_when_resumed(ranks, tmp_path, words):
    config = config_of("grpo", *words, folder=tmp_path / "sizes")
    sizes = {name: value for name, value in vars(config.model).items() if name not in NO_SIZES and value is not None}
    parameters = {name: list(own.shape) for name, own in Decoder(DecoderConfig(**sizes)).named_parameters()}
    stubs = [StreamingStub(slow, parameters=parameters) for _ in range(2)]
    options = {"ranks": 2, "train__steps": 8, "rollout__save_completions": True, "rollout__servers_wait": 60.0}
    options |= {"rollout__servers": [stub.url for stub in stubs], "rollout__stop_truncated_above": None}

    def run(name, **more):
        made = config_of("grpo", *AHEAD, *words, folder=tmp_path / name, **options | more)
        if words:
            made.reward.function = None
        ranks(2).run(play, config=made)
        lines = [json.loads(line) for line in (tmp_path / name / "completions.jsonl").read_text().splitlines()]
        return rows_of(tmp_path / name), lines

    rows, answers = run("a", checkpoint__every=4)
    again, _ = run("b", checkpoint__resume=str(tmp_path / "a" / "checkpoints" / "step-000004"))
    # A checkpoint waits for whole answers.
    assert [row["rollout_late"] for row in rows] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert all((row["length"] == 2) == (row["rollout_late"] == 1) for row in rows) or words
    assert all(row["truncated"] == (not row["rollout_late"]) for row in rows)
    assert again == rows[4:]
    assert all(line["finished"] is False and line.get("late", False) == (line["step"] in (3, 7)) for line in answers)
    for stub in stubs:
        stub.shutdown()
        stub.server_close()
    numbers = {step: sum(line["step"] == step for line in answers) for step in (1, 3, 5, 7)}
    assert numbers == dict.fromkeys((1, 3, 5, 7), 16)
    own = config_of("grpo", *words, folder=tmp_path / "own", ranks=2, train__steps=8, rollout__save_completions=True)
    if words:
        own.reward.function = None
    ranks(2).run(play, config=own)
    lines = (tmp_path / "own" / "completions.jsonl").read_text().splitlines()
    assert [(line["step"], line["prompt"]) for line in answers] == [
        (line["step"], line["prompt"]) for line in map(json.loads, lines)
    ]


def test_where_nothing_can_be_late_the_key_is_refused(tmp_path):
    given = ("task=grpo", "launch.device=cpu", "rollout.late=cut")
    for words, told in (
        ((), "rollout.late"),
        (("rollout.staleness=1",), "rollout.late"),
        ((*AHEAD, "rollout.servers_api=vllm"), "tokens of vLLM's streams are not read; use rollout.late=carry"),
    ):
        with pytest.raises(ConfigError, match=told):
            compose(*given, *words, output_dir=tmp_path, machine=Machine(gpus=0, cores=2))
