"""Compares `ztk.Generator` with CTranslate2 and llama.cpp, each in its own environment: decoding the same Llama on the CPU.

    python scripts/compare_engines.py --peer ctranslate2=/envs/peers/bin/python --peer llama_cpp=/envs/llama/bin/python
    python scripts/compare_engines.py --size 30m --rounds 3 --json experiments/results/cpu/engines.jsonl

Without --peer the script looks for the peers in this environment. A peer's Python needs numpy and ctranslate2, or numpy, gguf and llama_cpp
(llama-cpp-python, which is compiled on installation). One randomly initialised Llama is written for all of them, as safetensors for ztk, in
CTranslate2's format, and as GGUF for llama.cpp, in fp32 and in each engine's 8-bit format. Measurements are processes with --threads threads
that take turns. A result is the median over rounds of the tokens per CPU second without the prompt, for one sequence and for 8. Goals relative
to the faster peer: 0.9 in fp32, 0.5 in 8 bits. A missed goal is only printed; exit code 1 if nothing could be compared.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from random_llama import SIZES, random_llama

PROMPT, SEQUENCES, FORMATS = 32, (1, 8), ("fp32", "int8")
GOALS = {"fp32": 0.9, "int8": 0.5}
MEASURED = "measured: "  # prefix of the line with a child's numbers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    parser.add_argument("--measure", nargs=2, metavar=("ENGINE", "FORMAT"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        engine, kind = given.measure
        found = ENGINES[engine](given.folder, kind=kind, threads=given.threads, tokens=given.tokens)
        print(MEASURED + json.dumps(found))
        return 0
    pythons = {"ztk": sys.executable} | dict.fromkeys(PEERS, sys.executable)
    pythons |= dict(one.split("=", 1) for one in given.peer)
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), size=given.size)
        found = {
            (engine, kind): rounds(Path(scratch), engine=engine, kind=kind, python=pythons[engine], given=given)
            for kind in FORMATS
            for engine in ("ztk", *PEERS)
        }
    return report(found, given=given)


def report(found: dict[tuple[str, str], list[float] | str], *, given: argparse.Namespace) -> int:
    """Prints the table. Returns 1 if no peer has numbers."""
    compared = 0
    for kind in FORMATS:
        own = found["ztk", kind]
        for engine in PEERS:
            other = found[engine, kind]
            if isinstance(own, str) or isinstance(other, str):
                print(f"{given.size} {kind} {engine}: {own if isinstance(own, str) else other}")
                continue
            compared += 1
            if given.json:
                record(own, other, engine=engine, kind=kind, given=given)
            ratios = [f"{mine / theirs:.2f}" for mine, theirs in zip(own, other, strict=True)]
            print(
                f"{given.size} {kind}: ztk / {engine} = {ratios[0]} for one sequence, {ratios[1]} for {SEQUENCES[1]} (goal {GOALS[kind]}); "
                f"{own[0]:.1f} and {other[0]:.1f}, {own[1]:.1f} and {other[1]:.1f} tokens per CPU second"
            )
    return int(not compared)


def record(own: list[float], other: list[float], *, engine: str, kind: str, given: argparse.Namespace) -> None:
    """Appends a line for each number of sequences."""
    commit = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    common = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "machine": f"{platform.machine()} {given.threads} threads",
        "size": given.size,
        "weights": kind,
        "peer": engine,
        "rounds": given.rounds,
        "goal": GOALS[kind],
    }
    with given.json.open("a") as file:
        for sequences, mine, theirs in zip(SEQUENCES, own, other, strict=True):
            numbers = {"sequences": sequences, "ztk_tokens_per_cpu_second": mine, "peer_tokens_per_cpu_second": theirs}
            file.write(json.dumps(common | numbers | {"ratio": mine / theirs}) + "\n")


def rounds(folder: Path, *, engine: str, kind: str, python: str, given: argparse.Namespace) -> list[float] | str:
    """Medians for each number of sequences, or the error of the engine."""
    command = [python, __file__, "--measure", engine, kind, "--folder", str(folder)]
    command += ["--threads", str(given.threads), "--tokens", str(given.tokens)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or engine == "ztk"}
    environment |= {"OMP_NUM_THREADS": str(given.threads)}
    each = []
    for _ in range(given.rounds):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        line = next((line for line in done.stdout.splitlines() if line.startswith(MEASURED)), None)
        if line is None:
            return (done.stderr.strip().splitlines() or ["no answer"])[-1]
        each.append(json.loads(line.removeprefix(MEASURED)))
    return [statistics.median(column) for column in zip(*each, strict=True)]


def per_cpu_second(generate: Callable[[int], None], *, sequences: int, tokens: int) -> float:
    """generate(n) answers all prompts with n tokens. The time of the prompt and the first token is subtracted."""
    generate(2)
    started = time.process_time()
    generate(1)
    first = time.process_time() - started
    started = time.process_time()
    generate(tokens)
    return sequences * (tokens - 1) / (time.process_time() - started - first)


def prompts(sequences: int) -> list[list[int]]:
    return [[(7 * place + 31 * row) % 1900 + 50 for place in range(PROMPT)] for row in range(sequences)]


# Engines, each in its own process and environment


def measure_ztk(folder: Path, *, kind: str, threads: int, tokens: int) -> list[float]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch
    from transformers import AutoModelForCausalLM

    from ztk.inference import Generator, InferencePolicy, SamplingParams

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    generator = Generator(model, policy=InferencePolicy(weights="stored" if kind == "fp32" else kind))

    def generate(count: int, *, rows: int) -> None:
        generator.forget_prefixes()
        generator.generate(prompts(rows), sampling=SamplingParams(max_tokens=count, temperature=0))

    return [per_cpu_second(lambda count, n=n: generate(count, rows=n), sequences=n, tokens=tokens) for n in SEQUENCES]


def measure_ctranslate2(folder: Path, *, kind: str, threads: int, tokens: int) -> list[float]:
    import ctranslate2

    path = folder / "ctranslate2"
    if not path.is_dir():
        write_ctranslate2(folder, to=path)
    kinds = {"fp32": "float32", "int8": "int8_float32"}
    engine = ctranslate2.Generator(str(path), device="cpu", compute_type=kinds[kind], intra_threads=threads)

    def generate(count: int, *, rows: int) -> None:
        named = [[f"t{token}" for token in prompt] for prompt in prompts(rows)]
        engine.generate_batch(
            named,
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token="t1999",
        )

    return [per_cpu_second(lambda count, n=n: generate(count, rows=n), sequences=n, tokens=tokens) for n in SEQUENCES]


def measure_llama_cpp(folder: Path, *, kind: str, threads: int, tokens: int) -> list[float]:
    import ctypes

    import llama_cpp
    import numpy

    path = folder / f"llama-{kind}.gguf"
    if not path.is_file():
        write_gguf(folder, to=path, kind=kind)
    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda *given: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    found = []
    for rows in SEQUENCES:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = rows * 256, rows
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = 0  # fp32, like the other engines
        context = llama_cpp.llama_init_from_model(model, settings)

        def decode(each: list[list[int]], *, at: int, context=context) -> list[int]:
            """Decodes each sequence's tokens from position `at` on. Returns the likeliest next token of each sequence."""
            batch = llama_cpp.llama_batch_init(sum(map(len, each)), 0, 1)
            last = []
            for sequence, own in enumerate(each):
                for place, token in enumerate(own):
                    row = batch.n_tokens
                    batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, at + place, 1
                    batch.seq_id[row][0], batch.logits[row] = sequence, place == len(own) - 1
                    batch.n_tokens += 1
                last.append(batch.n_tokens - 1)
            assert llama_cpp.llama_decode(context, batch) == 0
            logits = [llama_cpp.llama_get_logits_ith(context, row) for row in last]
            best = [int(numpy.ctypeslib.as_array(one, shape=(vocabulary,)).argmax()) for one in logits]
            llama_cpp.llama_batch_free(batch)
            return best

        def generate(count: int, *, rows=rows, context=context, decode=decode) -> None:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            following = decode(prompts(rows), at=0)
            for place in range(count - 1):
                following = decode([[token] for token in following], at=PROMPT + place)

        found.append(per_cpu_second(generate, sequences=rows, tokens=tokens))
        llama_cpp.llama_free(context)
    return found


ENGINES = {"ztk": measure_ztk, "ctranslate2": measure_ctranslate2, "llama_cpp": measure_llama_cpp}
PEERS = ("ctranslate2", "llama_cpp")


# One model in three formats


def write_model(folder: Path, *, size: str) -> None:
    """Writes transformers' Llama to `folder`/llama, and its tensors by name to a numpy file for the peers."""
    import numpy

    dim, layers, heads, inner, vocabulary = SIZES[size]
    model = random_llama(size)
    model.save_pretrained(folder / "llama")
    numpy.savez(folder / "tensors.npz", **{name: value.numpy() for name, value in model.state_dict().items()})
    sizes = {"dim": dim, "layers": layers, "heads": heads, "inner": inner, "vocabulary": vocabulary}
    (folder / "sizes.json").write_text(json.dumps(sizes))


def read_model(folder: Path) -> tuple[dict, dict[str, int]]:
    import numpy

    with numpy.load(folder / "tensors.npz") as file:
        return {name: file[name] for name in file.files}, json.loads((folder / "sizes.json").read_text())


def write_ctranslate2(folder: Path, *, to: Path) -> None:
    """Writes the files of CTranslate2's converter for transformers' Llama."""
    import numpy
    from ctranslate2.specs import common_spec, transformer_spec

    tensors, sizes = read_model(folder)
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        sizes["layers"],
        sizes["heads"],
        activation=common_spec.Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        num_heads_kv=sizes["heads"],
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = tensors["model.embed_tokens.weight"]
    decoder.layer_norm.gamma = tensors["model.norm.weight"]
    decoder.projection.weight = tensors["lm_head.weight"]
    for number, layer in enumerate(decoder.layer):
        block = f"model.layers.{number}."
        layer.self_attention.layer_norm.gamma = tensors[f"{block}input_layernorm.weight"]
        layer.ffn.layer_norm.gamma = tensors[f"{block}post_attention_layernorm.weight"]
        attention = [tensors[f"{block}self_attn.{part}_proj.weight"] for part in "qkv"]
        layer.self_attention.linear[0].weight = numpy.concatenate(attention)
        layer.self_attention.linear[1].weight = tensors[f"{block}self_attn.o_proj.weight"]
        layer.ffn.linear_0.weight = tensors[f"{block}mlp.gate_proj.weight"]
        layer.ffn.linear_0_noact.weight = tensors[f"{block}mlp.up_proj.weight"]
        layer.ffn.linear_1.weight = tensors[f"{block}mlp.down_proj.weight"]
    spec.register_vocabulary([f"t{number}" for number in range(sizes["vocabulary"])])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "t0", "t1", "t2"
    spec.config.layer_norm_epsilon = 1e-6
    spec.validate()
    spec.optimize()
    to.mkdir()
    spec.save(str(to))


def write_gguf(folder: Path, *, to: Path, kind: str) -> None:
    """Writes the file of llama.cpp's converter without a tokenizer. Its rotary embedding needs the halves of a head interleaved."""
    import gguf

    tensors, sizes = read_model(folder)
    heads = sizes["heads"]

    def interleaved(weight):
        return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    writer = gguf.GGUFWriter(str(to), "llama")
    writer.add_block_count(sizes["layers"])
    writer.add_context_length(1024)
    writer.add_embedding_length(sizes["dim"])
    writer.add_feed_forward_length(sizes["inner"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(sizes["dim"] // heads)
    writer.add_vocab_size(sizes["vocabulary"])
    writer.add_tokenizer_model("none")
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
    }
    names |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, value in tensors.items():
        own = name.removesuffix(".weight")
        if own in top:
            target = top[own]
        else:
            number, _, part = own.removeprefix("model.layers.").partition(".")
            target = f"blk.{number}.{names[part]}"
        turned = interleaved(value) if own[-6:] in ("q_proj", "k_proj") else value
        if kind == "int8" and value.ndim == 2:
            packed = gguf.quantize(turned, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{target}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{target}.weight", turned)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
