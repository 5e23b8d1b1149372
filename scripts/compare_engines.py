"""Compares `ztk.Generator` with llama.cpp, CTranslate2 and transformers on a real model: prompts and greedy decoding on one CPU thread.

    python scripts/get_model.py smollm2
    python scripts/compare_engines.py --peers /envs/peers/bin/python
    python scripts/compare_engines.py --peers /envs/peers/bin/python --only ztk/int8 llama.cpp/Q8_0 --works 1x512 --json FILE

PYTHON is an environment with llama_cpp (llama-cpp-python), ctranslate2, transformers and torch. Each engine reads the same model: ztk and
transformers the folder, llama.cpp a GGUF file that ztk exports as F16 and llama.cpp quantises, CTranslate2 the folder of its converter. Peers
run in their defaults, for llama.cpp a cache of keys and values in F16; "fp32 cache" has the precision of the other engines. Works are
sequences x tokens of the prompt; the prompts are English help texts. Each engine and format is a process that answers all works, and the
processes take turns. Printed are medians over rounds: tokens of the prompt per CPU second, decoded tokens per CPU second, the largest
resident memory during the work, and the share of the greedy tokens that equal transformers'.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import ROOT, append_rows, measured_apart, parser_of, status_bytes, table

WORKS = ("1x512", "8x512", "32x512", "1x2048")
FP32_CACHE = ", fp32 cache"
FORMATS = {
    "ztk": ("stored", "int8", "int4"),
    "transformers": ("fp32",),
    "ctranslate2": ("float32", "int8_float32"),
    "llama.cpp": ("Q8_0", "Q4_K_M", "F16", "F32", f"F32{FP32_CACHE}", f"Q8_0{FP32_CACHE}"),
}
QUANTISED = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0", "Q4_K_M": "MOSTLY_Q4_K_M"}
# Answers to prompts: (prompts, tokens of each answer) -> the answers.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def main() -> None:
    parser = parser_of(__doc__)
    home = Path.home() / ".cache" / "ztk" / "smollm2"
    parser.add_argument("--model", type=Path, default=home, help="a folder of a transformers Llama (%(default)s)")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="interpreter of the peers")
    parser.add_argument("--works", nargs="+", default=WORKS, metavar="ROWSxPROMPT", help=" ".join(WORKS))
    parser.add_argument("--only", nargs="+", metavar="ENGINE/FORMAT", help="default: all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=33, help="of each answer")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    parser.add_argument("--measure", nargs=2, metavar=("ENGINE/FORMAT", "SCRATCH"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        name, scratch = given.measure
        print(json.dumps(measure(name, scratch=Path(scratch), given=given)))
        return
    known = [f"{engine}/{kind}" for engine, kinds in FORMATS.items() for kind in kinds]
    names = given.only or known
    if unknown := sorted(set(names) - set(known)):
        sys.exit(f"{', '.join(unknown)}: must be among {', '.join(known)}")
    with tempfile.TemporaryDirectory() as scratch:
        write_prompts(given.model, works=given.works, to=Path(scratch, "prompts.json"))
        rounds: dict[str, list[dict]] = {name: [] for name in names}
        for number in range(given.rounds):
            for name in names:
                rounds[name].append(run(name, scratch=scratch, given=given))
                print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
    report({name: summary(each) for name, each in rounds.items()}, given=given)


def write_prompts(model: Path, *, works: list[str], to: Path) -> None:
    """Writes token ids of `rows` different beginnings of the text for each work, ROWSxPROMPT."""
    from tokenizers import Tokenizer

    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    prompts = {}
    for work in works:
        rows, length = map(int, work.split("x"))
        prompts[work] = [tokens[1000 * row : 1000 * row + length] for row in range(rows)]
    to.write_text(json.dumps(prompts))


def run(name: str, *, scratch: str, given: argparse.Namespace) -> dict[str, dict]:
    """Measures one engine and format in a process. Returns the figures by work."""
    stored = Path(scratch, "exported.gguf")
    if name.startswith("llama.cpp/") and not stored.exists():
        export = ["-m", "ztk.checkpoint", "export", given.model, stored, "--format", "gguf"]
        subprocess.run([sys.executable, *map(str, export)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    python = sys.executable if name.startswith("ztk/") else given.peers
    asked = ("--measure", name, scratch, "--model", given.model, "--tokens", given.tokens)
    return measured_apart(python, __file__, *asked, OMP_NUM_THREADS="1")


def measure(name: str, *, scratch: Path, given: argparse.Namespace) -> dict[str, dict]:
    """Opens the model, then answers each work. CPU seconds of the prompt include the first answered token."""
    engine, kind = name.split("/")
    generate = ENGINES[engine](given.model, kind=kind, scratch=scratch)
    found = {}
    for work, prompts in json.loads((scratch / "prompts.json").read_text()).items():
        generate([prompt[:32] for prompt in prompts], 2)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        started = time.process_time()
        generate(prompts, 1)
        prompt_seconds = time.process_time() - started
        started = time.process_time()
        answers = generate(prompts, given.tokens)
        seconds = time.process_time() - started - prompt_seconds
        found[work] = {
            "prompt": sum(map(len, prompts)) / prompt_seconds,
            "decode": len(prompts) * (given.tokens - 1) / seconds,
            "megabytes": status_bytes("VmHWM") / 1e6,
            "answers": answers,
        }
    return found


def summary(rounds: list[dict[str, dict]]) -> dict[str, dict]:
    """Medians of the figures by work, and the answers of the last round."""
    figures = ("prompt", "decode", "megabytes")
    return {
        work: {key: statistics.median(each[work][key] for each in rounds) for key in figures}
        | {"answers": rounds[-1][work]["answers"]}
        for work in rounds[0]
    }


def report(found: dict[str, dict[str, dict]], *, given: argparse.Namespace) -> None:
    """Prints a table per work, and appends the rows to the file."""
    for work in given.works:
        reference = found.get("transformers/fp32", {}).get(work)
        lines, rows = [], []
        for name, one in ((name, works[work]) for name, works in found.items()):
            pairs = zip(one["answers"], reference["answers"], strict=True) if reference else []
            equal = [left == right for answer, other in pairs for left, right in zip(answer, other, strict=True)]
            share = sum(equal) / len(equal) if equal else None
            figures = {key: round(one[key], 2) for key in ("prompt", "decode", "megabytes")}
            lines.append(
                [
                    *(name, f"{one['decode']:.1f}", f"{one['megabytes']:.0f}", f"{one['prompt']:.0f}"),
                    "" if share is None else f"{share:.0%}",
                ]
            )
            rows.append({"engine": name, "work": work, "rounds": given.rounds, "equal_tokens": share} | figures)
        columns = ["engine", "decoded / CPU s", "peak MB", "prompt tokens / CPU s", "greedy tokens as transformers"]
        Console(width=110).print(table(f"{work}: sequences x tokens of the prompt", columns, lines, left=["engine"]))
        if given.json:
            append_rows(given.json, rows, machine="one thread", model=given.model.name)


# Engines, each in its own process


def open_ztk(model: Path, *, kind: str, scratch: Path) -> Generate:
    import torch

    from ztk.inference import Generator, InferencePolicy, SamplingParams
    from ztk.serve.models import open_model

    torch.set_num_threads(1)
    generator = Generator(open_model(str(model)).module, policy=InferencePolicy(weights=kind))

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        generator.forget_prefixes()
        found = generator.generate(prompts, sampling=SamplingParams(max_tokens=tokens, temperature=0))
        return [answer.tokens for [answer] in found]

    return generate


def open_transformers(model: Path, *, kind: str, scratch: Path) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        rows = torch.tensor(prompts)
        with torch.no_grad():
            found = module.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
        return found[:, rows.shape[1] :].tolist()

    return generate


def open_ctranslate2(model: Path, *, kind: str, scratch: Path) -> Generate:
    import ctranslate2

    path = scratch / "ctranslate2"
    if not path.is_dir():
        ctranslate2.converters.TransformersConverter(str(model)).convert(str(path))
    engine = ctranslate2.Generator(str(path), device="cpu", compute_type=kind, intra_threads=1)
    names = json.loads((path / "vocabulary.json").read_text(encoding="utf-8"))

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        found = engine.generate_batch(
            [[names[token] for token in prompt] for prompt in prompts], max_length=tokens, min_length=tokens,
            sampling_topk=1, include_prompt_in_result=False,
        )  # fmt: skip
        return [one.sequences_ids[0] for one in found]

    return generate


def open_llama_cpp(model: Path, *, kind: str, scratch: Path) -> Generate:
    import ctypes

    import llama_cpp
    import numpy

    silent = llama_cpp.llama_log_callback(lambda *given: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    kind, _, cache = kind.partition(", ")
    path = scratch / f"{kind}.gguf"
    if not path.is_file():
        options = llama_cpp.llama_model_quantize_default_params()
        options.nthread, options.ftype = 1, getattr(llama_cpp, f"LLAMA_FTYPE_{QUANTISED[kind]}")
        source = str(scratch / "exported.gguf").encode()
        assert llama_cpp.llama_model_quantize(source, str(path).encode(), options) == 0
    opened = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(opened))

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        llama_cpp.llama_log_set(silent, ctypes.c_void_p())  # keeps the callback as long as the engine
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = len(prompts) * (len(prompts[0]) + tokens + 8)
        settings.n_seq_max, settings.n_batch = len(prompts), settings.n_ctx
        settings.n_threads = settings.n_threads_batch = 1
        if cache:
            settings.type_k = settings.type_v = 0  # GGML_TYPE_F32; the default is F16
        context = llama_cpp.llama_init_from_model(opened, settings)
        answers: list[list[int]] = [[] for _ in prompts]
        for number in range(tokens):
            pieces = prompts if number == 0 else [answer[-1:] for answer in answers]
            at = 0 if number == 0 else len(prompts[0]) + number - 1
            batch = llama_cpp.llama_batch_init(sum(map(len, pieces)), 0, 1)
            last = []
            for sequence, piece in enumerate(pieces):
                for place, token in enumerate(piece):
                    row = batch.n_tokens
                    batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, at + place, 1
                    batch.seq_id[row][0], batch.logits[row] = sequence, place == len(piece) - 1
                    batch.n_tokens += 1
                last.append(batch.n_tokens - 1)
            assert llama_cpp.llama_decode(context, batch) == 0
            for answer, row in zip(answers, last, strict=True):
                logits = llama_cpp.llama_get_logits_ith(context, row)
                answer.append(int(numpy.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax()))
            llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return answers

    return generate


ENGINES = {
    "ztk": open_ztk,
    "transformers": open_transformers,
    "ctranslate2": open_ctranslate2,
    "llama.cpp": open_llama_cpp,
}

if __name__ == "__main__":
    main()
