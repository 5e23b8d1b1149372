"""generation_config.json in a model's folder: the authors' sampling parameters and the tokens that end an answer.

The user's values of `sampling.*` take precedence over the file's, which take precedence over the option file's. A field that ztk does not
implement is an error, unless its value has no effect.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ztk.config.keys import derive
from ztk.config.record import load
from ztk.core.policies.config import Config
from ztk.core.policies.records import run_record

FILE = "generation_config.json"
# Field of the file -> key of `sampling`.
_TAKEN = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
    "num_return_sequences": "n",
}
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")
# Fields that truncate the token distribution. Greedy decoding ignores them.
_CUTS = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
# Fields that ztk does not implement -> values without effect, in addition to null and an empty list.
_NEUTRAL = {
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "encoder_repetition_penalty", "guidance_scale", "typical_p"), (1,)
    ),
    **dict.fromkeys(
        ("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "no_repeat_ngram_size", "penalty_alpha"), (0,)
    ),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "sequence_bias", "suppress_tokens"), ()),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), ()),
    **dict.fromkeys(
        ("exponential_decay_length_penalty", "watermarking_config", "dola_layers", "max_time", "top_h"), ()
    ),
}
_USUAL_LENGTHS = (None, 20)  # values of max_length without effect; 20 is the default of transformers


def take_generation(config: Config) -> list[str]:
    """Sets `sampling.*` of `task=generate` and `task=serve` from the file, unless the user set them. Returns one line per fault."""
    inference = config.inference
    if config.task.name not in ("generate", "serve") or inference.model is None:
        return []
    file = generation_file(inference.model)
    if file is None or inference.generation_config is False:
        return []
    try:
        found = read_generation(file)
    except ValueError as error:
        return [str(error)]
    values = _sampling(found)
    open_values = {name: value for name, value in values.items() if f"sampling.{name}" not in config.given}
    is_drawn = open_values.get("temperature", config.sampling.temperature) != 0
    if faults := [*_undone(found, file=file, is_drawn=is_drawn)]:
        return faults
    for name, value in open_values.items():
        derive(config, key=f"sampling.{name}", value=value, reason=f"from {file}")
    if open_values:
        shown = ", ".join(f"{name}={value}" for name, value in open_values.items())
        config.notes.append(f"sampling of {file}: {shown}")
    if found.get("max_length") not in _USUAL_LENGTHS:
        config.notes.append(
            f"{file}: max_length={found['max_length']} is not used: answers end where the context does; use sampling.max_tokens=N, or "
            "inference.max_model_len=N"
        )
    return []


def generation_file(path: str) -> Path | None:
    """Returns the file in the folder `path`. A run or checkpoint of `model=hf` uses the file of its base model."""
    folder = Path(path).expanduser()
    if not (folder / FILE).is_file() and not (folder / "config.json").is_file() and (run := run_record(path)):
        folder = Path(load(run).model.path or folder)
    return folder / FILE if (folder / FILE).is_file() else None


def read_generation(file: Path) -> dict[str, Any]:
    """Returns the fields with a value. Raises ValueError if the file is not a JSON object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: is no JSON ({error}); repair it, or use inference.generation_config=false") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: must be a JSON object; repair it, or use inference.generation_config=false")
    return {name: value for name, value in found.items() if value is not None and value != []}


def end_tokens(file: Path | None) -> tuple[int, ...]:
    """Returns the tokens that end an answer; none without a file."""
    named = None if file is None else read_generation(file).get("eos_token_id")
    return () if named is None else (named,) if isinstance(named, int) else tuple(named)


def _sampling(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of `sampling` in the file.

    do_sample=false means greedy decoding. With do_sample=true, a missing temperature means 1.
    """
    values = {key: found[name] for name, key in _TAKEN.items() if name in found}
    if values.get("top_k", 0) < 0:
        values["top_k"] = 0
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if found.get("do_sample") is False:
        values["temperature"] = 0.0
    elif "temperature" not in values and (found.get("do_sample") or any(name in values for name in _CUTS)):
        values["temperature"] = 1.0
    return {name: float(value) if name in _FLOATS else value for name, value in values.items()}


def _undone(found: Mapping[str, Any], *, file: Path, is_drawn: bool) -> Iterator[str]:
    """Yields one line per field that affects transformers' answers and that ztk does not implement. is_drawn: whether tokens are
    sampled.
    """
    for name, neutral in _NEUTRAL.items():
        if name in found and found[name] not in neutral and (is_drawn or name not in _CUTS):
            yield (
                f"{file}: {name}={found[name]} changes answers, and ztk has no such step: remove it there, or use "
                "inference.generation_config=false and sampling.* of your own"
            )
