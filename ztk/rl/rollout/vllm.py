"""Clients of vLLM's server, which `vllm serve` and `trl vllm-serve` start.

[Note: vLLM's endpoints] They are read from the documentation and the code of vLLM 0.30 to 0.32 and of TRL 1.16. `POST /v1/completions`
draws: `return_token_ids` adds `token_ids` to a choice, `return_tokens_as_token_ids` writes tokens of `logprobs` as `token_id:5`, and `n`
answers to a prompt have the seeds `seed`, `seed + 1` and so on. Servers with VLLM_SERVER_DEV_MODE=1, which `trl vllm-serve` sets, also
have `/server_info`, `/pause`, `/resume`, `/collective_rpc`, `/reset_prefix_cache`, `/update_weight_version` and `/weight_info`.
`reload_weights` reads safetensors from a folder, so the run folder must have the same path on the server's machine. It is not atomic:
a failed one leaves the server paused, and the label of the weights as it was, so that no answer of mixed weights counts.

[Note: Versions of vLLM's answers] A completion does not have the version of its weights. The client knows the label of the server from
before a request, and asks for it after the request. Labels are unique to a run and a step, and `/pause?mode=wait` lets answers end before
new weights come, so an answer is drawn as a whole by weights between these two labels. Its tokens get the older one. A server that starts
again has no label of the run.
"""

import http.client
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ztk.rl.rollout.clients import PROBE_SECONDS, Answer, Channel, Draw, Failed, Reply, ServerFault, Weights

_SEEDS = (1 << 62) - 1  # seeds are signed 64-bit numbers, and further answers have larger ones
_ROUNDED = 1e-3  # a log-probability of rounded numbers may be above 0 by less
_DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, and vLLM 0.30 or later"


class VllmClient:
    """A server of vLLM whose model has the run's names of parameters. vocabulary: number of the model's tokens."""

    def __init__(self, channel: Channel, *, vocabulary: int) -> None:
        self.channel, self._vocabulary, self.sent_bytes = channel, vocabulary, 0
        self._model = ""

    def look(self) -> str | None:
        """Returns the label of the weights. Raises ServerFault for a server that cannot draw for a trainer."""
        info = self._developed("GET", "/server_info?config_format=json", seconds=PROBE_SECONDS)
        if (mode := info["vllm_config"]["model_config"]["logprobs_mode"]) != "processed_logprobs":
            raise ServerFault(
                f"rollout.servers: {self.channel.url} returns {mode}, without rollout.temperature; start it with --logprobs-mode "
                "processed_logprobs"
            )
        self._model = self.channel.request("GET", "/v1/models", seconds=PROBE_SECONDS)["data"][0]["id"]
        return self._label()

    def send(self, *, version: str, weights: Weights) -> None:
        """Has the server read the files. Running requests end with the old weights. Raises ConnectionError if it keeps old prefixes."""
        assert isinstance(weights, Path), "vLLM reads files"
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.absolute())}}
        self._developed("POST", "/pause?mode=wait")
        self._developed("POST", "/collective_rpc", body=json.dumps(call).encode())
        emptied = self._developed("POST", "/reset_prefix_cache")
        if not isinstance(emptied, Mapping) or emptied.get("success") is not True:
            raise ConnectionError("the cache of prefixes has keys and values of the old weights")
        self._developed("POST", "/update_weight_version", body=json.dumps({"new_version": version}).encode())
        self._developed("POST", "/resume")
        self.sent_bytes += sum(file.stat().st_size for file in weights.glob("*.safetensors"))

    def answer(self, given: Draw, *, version: str, connection: http.client.HTTPConnection) -> Reply:
        """Draws with seeds of the keys. Raises ConnectionError if answers are missing, and Failed for ones without usable log-probabilities."""
        body = _body(given, model=self._model)
        reply = self.channel.request("POST", "/v1/completions", body=body, connection=connection)
        choices = sorted(reply["choices"], key=lambda one: one["index"])
        if len(choices) != len(given.sampling):
            raise ConnectionError(f"{len(choices)} answers instead of {len(given.sampling)}")
        answers = [self._answer(choice, given=given, version=version) for choice in choices]
        return Reply(results=answers, versions={version, str(self._label())})

    def _label(self) -> str | None:
        return self._developed("GET", "/weight_info", seconds=PROBE_SECONDS)["weight_version"]

    def _developed(self, method: str, path: str, **options: Any) -> Any:
        """Calls an endpoint of the development mode. Raises ServerFault if the server has none."""
        try:
            return self.channel.request(method, path, **options)
        except ServerFault as error:
            raise ServerFault(f"rollout.servers: {error}; {_DEV_MODE}") from None

    def _answer(self, choice: Mapping[str, Any], *, given: Draw, version: str) -> Answer:
        tokens, own, reason = choice.get("token_ids"), choice.get("logprobs"), choice["finish_reason"]
        most, stops = given.sampling[0].max_tokens, given.sampling[0].stop_token_ids
        if tokens is None or own is None or own.get("token_logprobs") is None:
            raise self._fault("returns answers without token_ids or logprobs, which it was asked for")
        values, names = own["token_logprobs"], own.get("tokens")
        if reason not in ("stop", "length"):  # abort: by another client
            raise ConnectionError(f"an answer ended with {reason}")
        if choice.get("prompt_token_ids") not in (None, list(given.prompt)):
            raise self._fault("has computed another prompt than it was sent")
        if names != [f"token_id:{token}" for token in tokens] or len(values) != len(tokens):
            raise self._fault(f"returns log-probabilities of {_short(names)} for the tokens {_short(tokens)}")
        if not all(isinstance(value, int | float) and -math.inf < value < _ROUNDED for value in values):
            raise self._fault(f"returns the log-probabilities {_short(values)}")
        if not all(0 <= token < self._vocabulary for token in tokens) or not 0 < len(tokens) <= most:
            raise self._fault(
                f"returns {len(tokens)} tokens {_short(tokens)}; the most are {most} tokens below {self._vocabulary}, so its model is "
                "another one than the run's"
            )
        is_ended = tokens[-1] in stops
        if any(token in stops for token in tokens[:-1]) or (reason == "stop" and not is_ended):
            raise self._fault(f"ended the answer {_short(tokens)} by others than the tokens {list(stops)}")
        if not is_ended and len(tokens) < most:
            raise self._fault(
                f"ends answers after {len(tokens)} of {most} tokens; start it with --max-model-len of data.seq_len"
            )
        logprobs = torch.tensor(values, dtype=torch.float32)
        return Answer(
            tokens=tokens,
            logprobs=logprobs,
            processed_logprobs=logprobs,
            finish_reason="stop" if is_ended else "length",
            versions=[version] * len(tokens),
        )

    def _fault(self, text: str) -> Failed:
        return Failed(f"{self.channel.url} {text}")


def _body(given: Draw, *, model: str) -> bytes:
    """A request for one answer per `sampling`. It has all fields that have defaults in the model's generation_config.json."""
    one = given.sampling[0]
    fields = {
        "model": model,
        "prompt": list(given.prompt),
        "n": len(given.sampling),
        "seed": one.draw_key & _SEEDS,
        "max_tokens": one.max_tokens,
        "min_tokens": 0,
        "temperature": one.temperature,
        "stop_token_ids": list(one.stop_token_ids),
        "ignore_eos": True,
        "stop": [],
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return json.dumps(fields).encode()


def _short(values: Any) -> str:
    text = str(values)
    return text if len(text) <= 80 else f"{text[:80]}..."
