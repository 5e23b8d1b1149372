"""Packing text: the same bytes for every rank, a fair held-out part, clear refusals."""

import itertools
import math
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from ztk.data import ByteCorpus
from ztk.data.corpus import num_held_out

MIB = 1 << 20


@pytest.fixture
def text(tmp_path) -> Path:
    """A folder with three files, one nested, and things to leave out."""
    root = tmp_path / "text"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b.txt").write_bytes(b"b" * 300)
    (root / "a.txt").write_bytes(bytes(range(256)) * 2)
    (root / "sub" / "c.py").write_bytes(b"c" * 200)
    (root / ".hidden").write_bytes(b"no")
    (root / ".git" / "config").write_bytes(b"no")
    return root


def opened(path, tmp_path, **options) -> ByteCorpus:
    return ByteCorpus.open(path, cache_dir=str(tmp_path / "cache"), **options)


def test_folder_packs_every_visible_file_in_sorted_order(text, tmp_path):
    corpus = opened(str(text), tmp_path)
    everything = bytes(range(256)) * 2 + b"b" * 300 + b"c" * 200
    held_out = num_held_out(len(everything), share=0.05)
    assert corpus.num_files == 3
    assert bytes(corpus.train.tolist()) == everything[:-held_out]
    assert bytes(corpus.validation.tolist()) == everything[-held_out:]


def test_paths_globs_and_lists(text, tmp_path):
    one = opened([str(text / "a.txt"), str(text / "b.txt")], tmp_path)
    glob = opened(str(text / "*.txt"), tmp_path)
    assert one.digest == glob.digest
    assert torch.equal(one.train, glob.train)
    assert opened(str(text / "**" / "*.py"), tmp_path).num_files == 1
    assert opened([str(text), str(text / "a.txt")], tmp_path).num_files == 3  # one named twice counts once
    assert opened([str(text / "b.txt"), str(text / "a.txt")], tmp_path).digest != one.digest  # the given order counts


@pytest.mark.parametrize("total", [100, MIB - 1, MIB, MIB + 1, 2 * MIB + 12345])
def test_every_byte_is_in_exactly_one_part(tmp_path, total):
    data = torch.randint(256, (total,), generator=torch.Generator().manual_seed(total), dtype=torch.uint8)
    file = tmp_path / "random.bin"
    file.write_bytes(bytes(data.tolist()))
    corpus = opened(str(file), tmp_path, validation_fraction=0.1)
    train, validation = [], []
    for period in data.split(MIB):
        held_out = int(len(period) * 0.1)
        train.append(period[: len(period) - held_out])
        validation.append(period[len(period) - held_out :])
    assert torch.equal(corpus.train, torch.cat(train))
    assert torch.equal(corpus.validation, torch.cat(validation))


def test_a_changed_file_is_packed_anew(text, tmp_path):
    before = opened(str(text), tmp_path)
    (text / "a.txt").write_bytes(b"z" * 512)
    os.utime(text / "a.txt", ns=(1, 1))
    after = opened(str(text), tmp_path)
    assert before.digest != after.digest
    assert after.train[0] == ord("z")


def test_second_opening_reads_the_cache_alone(text, tmp_path, monkeypatch):
    first = opened(str(text), tmp_path)
    monkeypatch.setattr("ztk.data.corpus._write", None)
    assert opened(str(text), tmp_path).digest == first.digest


def _open_in_process(arguments) -> tuple[str, int]:
    path, cache = arguments
    corpus = ByteCorpus.open(path, cache_dir=cache)
    return corpus.digest, int(corpus.train.long().sum())


def test_many_ranks_at_once_get_one_file(text, tmp_path):
    (text / "big.txt").write_bytes(os.urandom(3 * MIB))
    arguments = [(str(text), str(tmp_path / "cache"))] * 4
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.map(_open_in_process, arguments, chunksize=1)
    assert len(set(results)) == 1
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 1
    assert not list((tmp_path / "cache").glob("*.building"))


def test_interrupted_packing_leaves_nothing_that_looks_finished(text, tmp_path, monkeypatch):
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("ztk.data.corpus.os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        opened(str(text), tmp_path)
    assert not list((tmp_path / "cache").glob("*.bin"))
    monkeypatch.undo()
    assert opened(str(text), tmp_path).num_files == 3


def test_bigram_entropy_of_known_texts(tmp_path):
    def entropy(content: bytes) -> float:
        file = tmp_path / "known.txt"
        file.write_bytes(content)
        os.utime(file, ns=(len(content), hash(content) % 10**9))
        return opened(str(file), tmp_path, validation_fraction=0.5).bigram_entropy()

    assert entropy(b"ab" * 5000) == pytest.approx(0.0, abs=1e-9)  # the next byte follows from the last
    coins = torch.randint(2, (200_000,), generator=torch.Generator().manual_seed(0))
    assert entropy(bytes((coins + 97).tolist())) == pytest.approx(math.log(2), abs=1e-3)


def test_bigram_entropy_equals_a_plain_count(text, tmp_path):
    validation = list(opened(str(text), tmp_path, validation_fraction=0.6).validation.tolist())
    pairs, firsts = {}, {}
    for a, b in itertools.pairwise(validation):
        pairs[a, b] = pairs.get((a, b), 0) + 1
        firsts[a] = firsts.get(a, 0) + 1
    total = len(validation) - 1
    plain = -sum(n / total * math.log(n / firsts[a]) for (a, _), n in pairs.items())
    assert opened(str(text), tmp_path, validation_fraction=0.6).bigram_entropy() == pytest.approx(plain, rel=1e-12)


def test_default_is_the_standard_library(tmp_path):
    corpus = ByteCorpus.open(cache_dir=str(tmp_path))
    assert corpus.num_files > 200
    assert len(corpus.train) > 2_000_000
    assert 0.04 < len(corpus.validation) / len(corpus.train) < 0.06
    assert b"import " in bytes(corpus.train[:100_000].tolist())
    assert 1.5 < corpus.bigram_entropy() < 3.5  # source code: far below 8 bits, far above nothing


def test_refusals_name_path_and_fix(text, tmp_path):
    with pytest.raises(ValueError, match=r"data\.path=.*nowhere: no such file or folder"):
        opened(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(ValueError, match=r"data\.path=.*\*\.md: the pattern matches no file"):
        opened(str(text / "*.md"), tmp_path)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(ValueError, match="has no files"):
        opened(str(tmp_path / "hollow"), tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="0 bytes in 1 files"):
        opened(str(tmp_path / "empty.txt"), tmp_path)
    with pytest.raises(ValueError, match=r"data\.validation_fraction=1\.5"):
        opened(str(text), tmp_path, validation_fraction=1.5)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_refuses_unreadable_and_unwritable_files(text, tmp_path):
    (text / "a.txt").chmod(0)
    with pytest.raises(ValueError, match=r"a\.txt: cannot be read"):
        opened(str(text), tmp_path)
    (text / "a.txt").chmod(0o644)
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        opened(str(text), tmp_path)


def test_a_cache_folder_that_is_a_file_is_refused(text, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        opened(str(text), tmp_path)
