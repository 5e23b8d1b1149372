"""Tokens in files: the right ones, held-out documents, one build for all, a kill at any note, refusals."""

import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from ztk.data import ByteTokenizer, tokencache
from ztk.data.sources import named_files
from ztk.data.tokencache import ReadPolicy, TokenPart, content_of, hash_of, open_part, training_texts

TEXTS = [f"document {number} " + "abc " * (number % 7) for number in range(200)]


class Wide(ByteTokenizer):
    """Tokens from 60000 on, so that they need 16 unsigned bits; a note of how many texts it was given."""

    vocab_size, end, digest = 1 << 16, (1 << 16) - 1, "wide"
    given: list[str]

    def __init__(self) -> None:
        self.given = []

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.given += texts
        return [[60000 + byte for byte in text.encode()] for text in texts]


@pytest.fixture
def lines(tmp_path) -> Path:
    folder = tmp_path / "lines"
    folder.mkdir()
    for part in range(4):
        text = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[part * 50 : part * 50 + 50])
        (folder / f"{part}.jsonl").write_text(text)
    return folder


def opened(path, tmp_path, tokenizer=None, **options) -> TokenPart:
    return open_part(
        named_files([str(path)]),
        tokenizer=tokenizer or ByteTokenizer(),
        policy=ReadPolicy(**options),
        cache_dir=str(tmp_path / "cache"),
    )


def documents_of(tokens, *, end: int = 0, offset: int = 0) -> list[str]:
    """The texts between end tokens; every document has one."""
    values = tokens.tolist()
    assert values[-1] == end
    found, current = [], []
    for value in values:
        if value == end:
            found.append(bytes(current).decode())
            current = []
        else:
            current.append(value - offset)
    return found


@pytest.mark.parametrize("kind", ["bytes", "wide"])
def test_every_document_is_on_one_side_in_order(lines, tmp_path, kind):
    tokenizer, end, offset = (ByteTokenizer(), 0, 0) if kind == "bytes" else (Wide(), Wide.end, 60000)
    part = opened(lines, tmp_path, tokenizer, share=0.1)
    limit = int(2**64 * 0.1)
    held = [text for text in TEXTS if hash_of(text) <= limit]
    assert 5 < len(held) < 40
    assert documents_of(part.held_out.long(), end=end, offset=offset) == held
    assert documents_of(part.train.long(), end=end, offset=offset) == [text for text in TEXTS if text not in held]
    counts = part.counts
    assert (counts.held_out_documents, counts.train_documents) == (len(held), 200 - len(held))
    assert counts.train_bytes + counts.train_documents == counts.train_tokens == len(part.train)
    assert counts.held_out_bytes == sum(len(text.encode()) for text in held)
    texts = training_texts(named_files([str(lines)]), policy=ReadPolicy(share=0.1))
    assert list(texts) == [text for text in TEXTS if text not in held]


def test_equal_documents_are_never_on_both_sides(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 3))
    part = opened(path, tmp_path, share=0.2)
    assert not set(documents_of(part.train)) & set(documents_of(part.held_out))


def test_few_documents_hold_out_the_one_with_the_smallest_hash(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} text")
    part = opened(tmp_path / "*.txt", tmp_path, share=0.0001)
    [held] = documents_of(part.held_out)
    assert held == min((f"{name} text" for name in "abc"), key=hash_of)
    assert opened(tmp_path / "*.txt", tmp_path, share=0.0).held_out.numel() == 0


def test_the_cache_is_named_after_content_tokenizer_and_options(lines, tmp_path):
    first = opened(lines, tmp_path)
    moved = tmp_path / "moved"
    lines.rename(moved)
    for file in moved.iterdir():
        os.utime(file, ns=(1, 1))
    assert opened(moved, tmp_path).digest == first.digest
    assert opened(moved, tmp_path, share=0.1).digest != first.digest
    assert opened(moved, tmp_path, skips=True).digest != first.digest
    assert opened(moved, tmp_path, Wide()).digest != first.digest
    (moved / "0.jsonl").write_text('{"text": "other"}\n')
    other = opened(moved, tmp_path)
    assert other.digest != first.digest and documents_of(other.train)[0] == "other"


def test_a_second_opening_tokenises_nothing(lines, tmp_path, monkeypatch):
    tokenizer = Wide()
    first = opened(lines, tmp_path, tokenizer)
    assert len(tokenizer.given) == 200
    monkeypatch.setattr(tokencache, "read_documents", None)
    assert opened(lines, tmp_path, tokenizer).digest == first.digest
    assert len(tokenizer.given) == 200


def test_a_build_reports_its_progress(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(tokencache, "BATCH_CHARACTERS", 300)
    seen = []
    open_part(
        named_files([str(lines)]), tokenizer=Wide(), policy=ReadPolicy(), cache_dir=str(tmp_path), progress=seen.append
    )
    shares, documents = [done.share for done in seen], [done.documents for done in seen]
    assert shares == sorted(shares) and 0 < shares[0] < 0.2 and 0.8 < shares[-1] <= 1
    assert documents == sorted(documents) and documents[-1] <= 200


def _open(arguments) -> tuple[str, int, int]:
    path, cache = arguments
    tokenizer = Wide()
    part = open_part(named_files([path]), tokenizer=tokenizer, policy=ReadPolicy(), cache_dir=cache)
    return part.digest, int(part.train.long().sum()), len(tokenizer.given)


def test_builds_at_the_same_time_are_one(lines, tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.map(_open, [(str(lines), str(tmp_path / "cache"))] * 4, chunksize=1)
    assert len({digest for digest, _, _ in found}) == len({total for _, total, _ in found}) == 1
    assert sorted(given for _, _, given in found) == [0, 0, 0, 200]
    assert not list((tmp_path / "cache").glob("*.building"))


@pytest.mark.parametrize("notes", [0, 1, 3])
@pytest.mark.parametrize("kind", ["lines", "pieces"])
def test_a_killed_build_goes_on_and_gives_the_same_tokens(lines, tmp_path, monkeypatch, notes, kind):
    monkeypatch.setattr(tokencache, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(tokencache, "JOURNAL_CHARACTERS", 900)
    path = lines
    if kind == "pieces":
        monkeypatch.setattr("ztk.data.documents.PIECE_BYTES", 64)
        path = tmp_path / "texts"
        path.mkdir()
        for number in range(4):
            (path / f"{number}.txt").write_text("\n".join(TEXTS[number * 50 : number * 50 + 50]))
    uninterrupted = opened(path, tmp_path / "other")
    original, made = tokencache._Builder._note, []

    def killed_in_a_process() -> None:
        def note(builder) -> None:
            if len(made) == notes:
                for out in builder._outs.values():
                    out.flush()  # more than was noted
                os.kill(os.getpid(), signal.SIGKILL)
            original(builder)
            made.append(1)

        tokencache._Builder._note = note
        opened(path, tmp_path)

    child = multiprocessing.get_context("fork").Process(target=killed_in_a_process)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    [left] = (tmp_path / "cache").glob("*.building")
    assert (left / "journal.json").exists() == bool(notes)
    part = opened(path, tmp_path)
    assert part.train.equal(uninterrupted.train) and part.held_out.equal(uninterrupted.held_out)
    assert part.counts == uninterrupted.counts and part.digest == uninterrupted.digest


def test_a_journal_ahead_of_its_files_starts_again(lines, tmp_path, monkeypatch):
    uninterrupted = opened(lines, tmp_path / "other")
    building = tmp_path / "cache" / f"tokens-{uninterrupted.digest}.building"
    building.mkdir(parents=True)
    for name in ("train.bin", "held_out.bin"):
        (building / name).write_bytes(b"rest")
    counts = {"train_tokens": 100, "train_documents": 9}
    (building / "journal.json").write_text(json.dumps({"items": 9, "limit": 5, "side": "train", "counts": counts}))
    assert opened(lines, tmp_path).train.equal(uninterrupted.train)


def test_bad_input_is_refused_or_skipped_and_counted(lines, tmp_path):
    with open(lines / "1.jsonl", "a") as file:
        file.write("{broken\n")
    (lines / "9.jsonl").touch()
    with pytest.raises(ValueError, match=r"1\.jsonl, line 51: not JSON"):
        opened(lines, tmp_path)
    part = opened(lines, tmp_path, skips=True)
    assert part.counts.skipped == 2
    assert part.counts.train_documents + part.counts.held_out_documents == 200
    assert "1.jsonl, line 51" in part.counts.faults[0] and "9.jsonl: the file is empty" in part.counts.faults[1]


def test_too_few_documents_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("only one")
    with pytest.raises(ValueError, match=r"1 documents, .*data\.validation_fraction=0 train\.eval_every=0"):
        opened(tmp_path / "a.txt", tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "same"}\n' * 3)
    with pytest.raises(ValueError, match=r"no document is left to train on \(3 held out, 0 skipped\)"):
        opened(tmp_path / "a.jsonl", tmp_path)


def test_a_file_that_changes_while_it_is_read_is_refused(lines, tmp_path):
    files = named_files([str(lines)])
    content_of(files, cache_dir=str(tmp_path / "cache"))
    with open(lines / "3.jsonl", "a") as file:
        file.write('{"text": "late"}\n')
    with pytest.raises(ValueError, match="changed while it was read"):
        open_part(files, tokenizer=ByteTokenizer(), policy=ReadPolicy(), cache_dir=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("*.building"))


def test_a_cache_that_cannot_be_written_is_refused(lines, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        opened(lines, tmp_path)


def test_opening_again_encodes_and_reads_nothing(lines, tmp_path, monkeypatch):
    first, again = Wide(), Wide()
    opened(lines, tmp_path, first)
    monkeypatch.setattr(tokencache, "read_documents", None)
    monkeypatch.setattr(tokencache.hashlib, "file_digest", None)  # of a file that did not change
    opened(lines, tmp_path, again)
    assert first.given and not again.given
