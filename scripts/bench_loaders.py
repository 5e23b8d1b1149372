"""Compares data loaders in tokens per second, and measures the memory of a run over a corpus of any size.

    python scripts/bench_loaders.py --work FOLDER                                  about 2 minutes on two cores
    python scripts/bench_loaders.py --work FOLDER --nanochat CHECKOUT              with nanochat's loader
    python scripts/bench_loaders.py --work FOLDER --memory 10                      memory only, with 10 GB made on the spot

Each loader returns shuffled batches of 8 x 1,024 tokens and their targets, int64 on the CPU, from the same documents and tokenizer:

- ztk: `ztk.data.TokenStream` over its token cache, also with packed documents kept separate;
- torch: `DataLoader` over a shuffled `datasets.Dataset` of sequences that were tokenised and cut before, with 0 and 2 workers;
- nanochat: tokenises and packs while it reads parquet files, as in its training. Its first batches, which fill its buffer, do not count.

The preparation (tokenising for ztk, cutting for torch) is printed separately. The ratio is relative to torch with its best number of workers.
Memory is measured in a process of its own, with pages of mapped files, while it builds the cache and while it reads all sequences in the order
of training.
"""

import argparse
import importlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import Peak, markdown, measured_apart, parser_of, status_bytes
from ztk.data import ReadPolicy, Share, SubwordTokenizer, TextPolicy, open_tokens

SEQUENCES, LENGTH, VOCABULARY = 8, 1024, 4096
PER_BATCH = SEQUENCES * LENGTH
READ = ReadPolicy(share=0.01)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for corpora, caches and results")
    parser.add_argument("--megabytes", type=int, default=64, help="size of the text")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument("--nanochat", type=Path, help="a checkout of github.com/karpathy/nanochat")
    parser.add_argument("--memory", type=float, help="measure only memory, with this many GB of text")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)  # internal: the measured process
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.read is not None:
        read_all(options.read, work=options.work)
    elif options.memory is not None:
        measure_memory(options.work, nbytes=int(options.memory * 1e9))
    else:
        compare(options)


# Tokens per second


def compare(options: argparse.Namespace) -> None:
    """Prints a line per loader and writes loaders.json."""
    path = write_corpus(options.work / f"corpus-{options.megabytes}.jsonl", nbytes=options.megabytes << 20)
    start = time.perf_counter()
    policy = TextPolicy(
        paths=(str(path),), tokenizer="train", vocab_size=VOCABULARY, read=READ, cache_dir=str(options.work / "cache")
    )
    corpus = open_tokens(policy)
    print(
        f"ztk: tokenizer and cache in {time.perf_counter() - start:.1f} s (0 s in later runs); {corpus.describe()[0]}"
    )
    apart = open_tokens(
        TextPolicy(**{name: getattr(policy, name) for name in policy.__slots__} | {"keeps_apart": True})
    )
    loaders: dict[str, Callable[[], Iterator[object]]] = {
        "ztk": lambda: ztk_batches(corpus),
        "ztk, documents kept apart": lambda: ztk_batches(apart),
    }
    sequences = cut_for_torch(corpus.parts[0].train, folder=options.work / "sequences")
    loaders |= {
        f"torch DataLoader, {workers} workers": lambda workers=workers: torch_batches(sequences, workers=workers)
        for workers in (0, 2)
    }
    if options.nanochat is not None:
        assert isinstance(corpus.tokenizer, SubwordTokenizer)
        given = {"checkout": options.nanochat, "tokenizer": corpus.tokenizer}
        loaders["nanochat"] = lambda: nanochat_batches(path, work=options.work, **given)
    rates = {name: tokens_per_second(make(), seconds=options.seconds) for name, make in loaders.items()}
    best = max(rate for name, rate in rates.items() if name.startswith("torch"))
    rows = [(name, f"{rate:,.0f}", f"{rate / best:.2f}") for name, rate in rates.items()]
    print(markdown(("loader", "tokens per second", "ratio"), rows))
    (options.work / "loaders.json").write_text(json.dumps(rates, indent=1))


def tokens_per_second(batches: Iterator[object], *, seconds: float) -> float:
    """The rate over `seconds`, after ten batches of warm-up."""
    for _ in itertools.islice(batches, 10):
        pass
    count, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        next(batches)
        count += 1
    return count * PER_BATCH / taken


def ztk_batches(corpus) -> Iterator[object]:
    stream = corpus.stream(seq_len=LENGTH, share=Share(micro_batch=SEQUENCES), seed=0)
    while True:
        yield stream.next_batch()


def cut_for_torch(tokens, *, folder: Path):
    """A `datasets.Dataset` of sequences, written once and memory-mapped."""
    import datasets
    import numpy

    start, count = time.perf_counter(), (len(tokens) - 1) // LENGTH
    rows = numpy.asarray(tokens)

    def sequences() -> Iterator[dict]:
        for number in range(count):
            yield {"input_ids": rows[number * LENGTH : (number + 1) * LENGTH + 1].astype("int32")}

    made = datasets.Dataset.from_generator(sequences, cache_dir=str(folder))
    print(f"torch: {count:,} sequences cut in {time.perf_counter() - start:.1f} s")
    return made.with_format("torch")


def torch_batches(sequences, *, workers: int) -> Iterator[object]:
    from torch.utils.data import DataLoader

    while True:
        for batch in DataLoader(sequences, batch_size=SEQUENCES, shuffle=True, drop_last=True, num_workers=workers):
            tokens = batch["input_ids"].long()
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def nanochat_batches(path: Path, *, work: Path, checkout: Path, tokenizer: SubwordTokenizer) -> Iterator[object]:
    """nanochat's loader over the same documents in parquet files."""
    import pyarrow
    import pyarrow.parquet

    sys.path.insert(0, str(checkout))
    dataloader: Any = importlib.import_module("nanochat.dataloader")
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    files = [work / f"nanochat-{number}.parquet" for number in range(2)]  # nanochat validates on the last file
    for file, part in zip(files, (texts, texts[:1000]), strict=True):
        pyarrow.parquet.write_table(pyarrow.table({"text": part}), file, row_group_size=1024)
    dataloader.list_parquet_files = lambda **options: [str(file) for file in files]

    class Tokenizer:
        """The methods that nanochat's loader calls."""

        def get_bos_token_id(self) -> int:
            return tokenizer.end

        def encode(self, several: list[str], *, prepend: int, num_threads: int) -> list[list[int]]:
            del num_threads  # tokenizers uses all cores
            return [[prepend, *tokens] for tokens in tokenizer.encode_batch(several)]

    return dataloader.tokenizing_distributed_data_loader_bos_bestfit(
        Tokenizer(), SEQUENCES, LENGTH, "train", device="cpu"
    )


# Memory


def measure_memory(work: Path, *, nbytes: int) -> None:
    """Prints the memory of a process that builds the cache and reads random sequences, for a tenth of the text and for all of it."""
    for size in (nbytes // 10, nbytes):
        path = write_corpus(work / f"memory-{size}.jsonl", nbytes=size)
        found = measured_apart(sys.executable, __file__, "--work", work, "--read", path)
        print(
            f"{size / 1e9:.1f} GB: {found['building'] / 1e6:.0f} MB at most while building ({size / 1e6 / found['build']:.0f} MB/s), "
            f"{found['reading'] / 1e6:.0f} MB while reading ({found['rate'] / 1e6:.1f} M tokens/s), {found['start'] / 1e6:.0f} MB before"
        )
        path.unlink()


def read_all(path: Path, *, work: Path) -> None:
    """Reads the bytes of `path` as tokens, all sequences in the order of training. Prints times and memory as JSON."""
    first = status_bytes("VmRSS")
    start = time.perf_counter()
    with Peak(lambda: status_bytes("VmRSS"), seconds=0.05) as building:
        corpus = open_tokens(TextPolicy(paths=(str(path),), read=READ, cache_dir=str(work / f"cache-{path.stem}")))
    built = time.perf_counter()
    count = len(corpus.parts[0].train) // PER_BATCH
    with Peak(lambda: status_bytes("VmRSS"), seconds=0.05) as reading:
        for _ in itertools.islice(ztk_batches(corpus), count):
            pass
    rate = count * PER_BATCH / (time.perf_counter() - built)
    found = {"building": building.value, "reading": reading.value, "start": first, "build": built - start, "rate": rate}
    print(json.dumps(found))


def write_corpus(path: Path, *, nbytes: int) -> Path:
    """Writes documents of 50 to 2,000 words from the standard library's sources, once."""
    if path.is_file():
        return path
    numbers, size = random.Random(0), 0
    words = Path(os.__file__).read_text().split() + Path(argparse.__file__).read_text().split()
    pool = [" ".join(numbers.choices(words, k=50)) for _ in range(5000)]
    with path.with_suffix(".part").open("w") as file:
        while size < nbytes:
            line = json.dumps({"text": " ".join(numbers.choices(pool, k=numbers.randint(1, 40)))}) + "\n"
            size += file.write(line)
    path.with_suffix(".part").rename(path)
    return path


if __name__ == "__main__":
    main()
