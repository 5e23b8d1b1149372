"""Mapped files whose pages are given back: the same tokens, and memory that does not grow with the file."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from ztk.data import Share, TokenStream, stream
from ztk.data.mapping import drop_pages, mapped

SIZE = 1 << 25


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return mapped(path, size=SIZE, dtype=torch.uint8)


def file_bytes() -> int:
    """Bytes of mapped files in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_dropped_pages_leave_memory_and_are_read_again(data):
    int(data[:4096].sum())  # the library's own pages come into memory
    before = file_bytes()
    total = int(data.sum())
    grown = file_bytes() - before
    drop_pages(data[100:200])  # any part names the mapping
    left = file_bytes() - before
    assert grown > SIZE // 2 > SIZE // 4 > left  # other pages of libraries come and go
    assert int(data.sum()) == total == SIZE // 256 * sum(range(256))


def test_a_stream_releases_read_pages(data, monkeypatch):
    """About every MAPPED_BYTES, with the sequences that it has without."""
    share = Share(micro_batch=4)
    plain, found = (TokenStream(own, seq_len=1000, share=share, seed=1) for own in (data.clone(), data))
    monkeypatch.setattr(stream, "MAPPED_BYTES", 1 << 20)
    with mock.patch.object(stream, "drop_pages", wraps=drop_pages) as dropped:
        for _ in range(8):
            assert torch.equal(plain.next_batch().tokens, found.next_batch().tokens)
    assert dropped.call_count == 2 * 2  # a sequence counts 66,537 bytes, 32 of them are two mebibytes


def test_other_tensors_are_left_alone():
    numbers = torch.arange(1 << 16)
    drop_pages(numbers)
    assert torch.equal(numbers, torch.arange(1 << 16))
