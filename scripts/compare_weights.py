"""Measures the cost of weight and cache formats: perplexity and greedy tokens of a small trained model, or bits per byte of a real one.

    python scripts/compare_weights.py
    python scripts/compare_weights.py --model FOLDER
    python scripts/compare_weights.py --model FOLDER --llama PYTHON    also Q8_0 and Q4_K_M of llama.cpp

With `--model` the text is the beginning of the help texts of Python's keywords, in windows of 1,024 tokens; int4 is also calibrated with a
later part of them. A file of quantised weights lies on the grid of its own format, where another 4-bit format may be exact. Each matrix
therefore gets noise first: 2 % of its standard deviation, and 10 %, which removes the grid. A model that was trained further needs none:
`--noise 0`. PYTHON is an environment with llama_cpp (llama-cpp-python) and numpy: ztk exports the model as F16, llama.cpp quantises the file
and computes the same tokens in the same windows. "size" is bits per weight of all matrices.

Without it, a decoder of 0.2 million parameters learns bytes of one file of Python's standard library for 120 steps and is evaluated on 2,048
bytes of another file. 48 tokens after each of 8 prompts are compared with unquantised weights. fp8 is the format of the cache. The last
two rows scale keys by 4,096 and queries by the inverse, which is exact in fp32: with an fp8 cache, and with an fp8 cache without scales.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.inference.trained import held_out, trained_decoder
from ztk.checkpoint.gguf.writing import export_gguf
from ztk.inference import Generator, InferencePolicy, SamplingParams, memory, perplexity
from ztk.nn import Decoder
from ztk.serve.models import Opened, open_model

PROMPTS, ANSWER = 8, 48
FP8_CACHE = "stored, fp8 cache"
LARGER = ("large keys, fp8 cache", "large keys, fp8 cache without scales")
FACTOR = 2.0**12
POLICIES = {
    "stored": InferencePolicy(),
    "int8": InferencePolicy(weights="int8"),
    "int4": InferencePolicy(weights="int4"),
    "fp8": InferencePolicy(weights="fp8"),
    FP8_CACHE: InferencePolicy(cache_dtype="fp8"),
}
NOISE = (0.02, 0.1)
TEXT_BYTES, WINDOW = 30_000, 1024
CALIBRATION_START, CALIBRATION_TOKENS = 40_000, 4096
# By name: weights, and whether they are calibrated.
REAL = {
    "stored": ("stored", False),
    "int8": ("int8", False),
    "int4": ("int4", False),
    "int4, calibrated": ("int4", True),
}
LLAMA = ("Q8_0", "Q4_K_M")
# In an environment with llama_cpp: quantises the file, prints the bytes of the quantised one and the sum of bits of all tokens but the first
# of each window.
LLAMA_CODE = """
import ctypes, json, os, sys
import llama_cpp, numpy
source, target, kind, tokens, window = sys.argv[1:]
tokens, window = json.load(open(tokens)), int(window)
quiet = llama_cpp.llama_log_callback(lambda *given: None)
llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
llama_cpp.llama_backend_init()
options = llama_cpp.llama_model_quantize_default_params()
options.nthread, options.ftype = 1, getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind)
assert llama_cpp.llama_model_quantize(source.encode(), target.encode(), options) == 0
model = llama_cpp.llama_model_load_from_file(target.encode(), llama_cpp.llama_model_default_params())
vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
settings = llama_cpp.llama_context_default_params()
settings.n_ctx = settings.n_batch = window
settings.n_threads = settings.n_threads_batch = 1
context, bits = llama_cpp.llama_init_from_model(model, settings), 0.0
for start in range(0, len(tokens), window):
    piece = tokens[start : start + window]
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(len(piece), 0, 1)
    for place, token in enumerate(piece):
        batch.token[place], batch.pos[place], batch.n_seq_id[place], batch.logits[place] = token, place, 1, True
        batch.seq_id[place][0] = 0
    batch.n_tokens = len(piece)
    assert llama_cpp.llama_decode(context, batch) == 0
    for place, token in enumerate(piece[1:]):
        row = llama_cpp.llama_get_logits_ith(context, place)
        row = numpy.ctypeslib.as_array(row, shape=(vocabulary,)).astype(numpy.float64)
        largest = row.max()
        bits += (largest + numpy.log(numpy.exp(row - largest).sum()) - row[token]) / numpy.log(2)
    llama_cpp.llama_batch_free(batch)
print(json.dumps([os.path.getsize(target), bits]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", help="folder of a transformers model, for example from scripts/get_model.py, or a run folder"
    )
    parser.add_argument("--noise", type=float, nargs="+", default=NOISE, help="shares of each matrix's deviation")
    parser.add_argument("--bytes", type=int, default=TEXT_BYTES, help="of the text that is judged")
    parser.add_argument("--calibration-tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has llama_cpp and numpy")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.model is None:
        compare_trained()
    else:
        compare_real(given)


def compare_real(given: argparse.Namespace) -> None:
    """Prints one line per noise and format."""
    opened = open_model(given.model)
    module = opened.module
    if not isinstance(module, nn.Module):
        sys.exit(f"{given.model} has packed weights: name the original model")
    texts = "\n\n".join(topics[name] for name in sorted(topics))
    text = texts[: given.bytes]
    tokens = opened.tokenizer.encode_text(text)
    # Six characters a token are more than it has.
    later = texts[CALIBRATION_START : CALIBRATION_START + 6 * given.calibration_tokens]
    calibration = tuple(opened.tokenizer.encode_text(later)[: given.calibration_tokens])
    weights = {name: value.clone() for name, value in module.named_parameters() if value.dim() == 2}
    print(f"{given.model}: {len(text.encode())} bytes, {len(tokens)} tokens, {len(calibration)} of calibration")
    for noise in given.noise:
        if noise:
            add_noise(module, weights=weights, noise=noise)
        found = bits_of_ztk(module, tokens=tokens, calibration=calibration)
        if given.llama:
            found = chain(found, bits_of_llama(opened, given=given, tokens=tokens, is_changed=bool(noise)))
        first = None
        for name, bits, note in found:
            per_byte = bits / len(text.encode())
            first = first or per_byte
            change = 100 * (per_byte / first - 1)
            print(f"noise {noise:4.0%}  {name:18s} {per_byte:.4f} bits per byte ({change:+.2f} %), {note}", flush=True)


def bits_of_ztk(
    module: nn.Module, *, tokens: list[int], calibration: tuple[int, ...]
) -> Iterator[tuple[str, float, str]]:
    """Name, bits of the tokens, and a note, for each format of ztk."""
    for name, (kind, calibrates) in REAL.items():
        start = time.process_time()
        chosen = calibration if calibrates else ()
        policy = InferencePolicy(weights=kind, calibration=chosen, max_model_len=WINDOW)
        generator = Generator(module, policy=policy)
        loading = time.process_time() - start
        scored = len(tokens) - -(-len(tokens) // WINDOW)
        bits = math.log2(perplexity(generator, tokens=tokens)) * scored
        yield name, bits, f"loaded in {loading:.1f} s of CPU"


def bits_of_llama(
    opened: Opened, *, given: argparse.Namespace, tokens: list[int], is_changed: bool
) -> Iterator[tuple[str, float, str]]:
    """The same for each format of llama.cpp. is_changed: the module has other weights than the folder."""
    module: Any = opened.module
    parameters = sum(value.numel() for value in module.parameters() if value.dim() == 2)
    with tempfile.TemporaryDirectory() as scratch:
        source, stored = Path(given.model), Path(scratch, "F16.gguf")
        if is_changed:
            source = Path(scratch, "model")
            module.save_pretrained(source)
            for file in Path(given.model).iterdir():
                if file.suffix in (".json", ".jinja") and not (source / file.name).exists():
                    shutil.copyfile(file, source / file.name)
        export_gguf(source, to=stored)
        Path(scratch, "tokens.json").write_text(json.dumps(tokens))
        for kind in LLAMA:
            target = Path(scratch, f"{kind}.gguf")
            words = [str(stored), str(target), kind, str(Path(scratch, "tokens.json")), str(WINDOW)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [given.llama, "-c", LLAMA_CODE, *words], capture_output=True, text=True, env=environment
            )
            if done.returncode:
                sys.exit(f"llama.cpp's {kind} failed: {done.stderr.strip()[-400:]}")
            nbytes, bits = json.loads(done.stdout.splitlines()[-1])
            yield f"llama.cpp {kind}", bits, f"size {8 * nbytes / parameters:.2f}"


@torch.no_grad()
def add_noise(model: nn.Module, *, weights: dict[str, torch.Tensor], noise: float) -> None:
    """Sets the model's matrices to `weights` plus noise."""
    generator = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters())
    for name, value in weights.items():
        drawn = torch.randn(value.shape, generator=generator)
        parameters[name].copy_(value + noise * value.std() * drawn)


def compare_trained() -> None:
    """Trains a small decoder and prints one line per format."""
    model, text, first = trained_decoder(), held_out(), None
    prompts = [text[200 * number : 200 * number + 32] for number in range(PROMPTS)]
    for name, policy in [*POLICIES.items(), *((name, POLICIES[FP8_CACHE]) for name in LARGER)]:
        if name == LARGER[0]:
            enlarge_keys(model)
        without = mock.patch.object(memory, "find_scales", lambda model, *, cache: None)
        with without if name == LARGER[1] else nullcontext():
            generator = Generator(model, policy=policy)
        cost = perplexity(generator, tokens=text)
        found = generator.generate(prompts, sampling=SamplingParams(max_tokens=ANSWER, temperature=0))
        tokens = [token for [answer] in found for token in answer.tokens]
        first = first or (cost, tokens)
        equal = sum(map(int.__eq__, tokens, first[1]))
        print(
            f"{name:36s} perplexity {cost:.2f} ({100 * (cost / first[0] - 1):+.2f} %), {equal} of {len(tokens)} tokens"
        )


def enlarge_keys(model: Decoder) -> None:
    """Scales keys up and queries down, so that their products stay equal."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention.key.weight"):
                parameter.mul_(FACTOR)
            elif name.endswith("attention.query.weight"):
                parameter.div_(FACTOR)


if __name__ == "__main__":
    main()
