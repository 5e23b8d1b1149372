"""Documents of every format, and their faults by file and position."""

import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ztk.data import documents
from ztk.data.documents import Document, Fault, read_documents
from ztk.data.sources import named_files

TEXTS = ["first\nline", "na\u00efve \u2211", "x" * 300]


def read(path, field="text") -> list[str]:
    """The texts of documents, joined from pieces; faults with a mark before them."""
    found = []
    for item in read_documents(path, field=field):
        if isinstance(item, Fault):
            found.append(f"! {item.text}")
        elif item.is_first:
            found.append(item.text)
        else:
            found[-1] += item.text
    return found


def write_lines(path, *lines: str) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        with pyarrow.output_stream(str(path), compression="zstd") as out:
            out.write(data)
        return
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst"])
def test_lines_of_json(tmp_path, name):
    path = tmp_path / name
    lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate(TEXTS)]
    write_lines(path, lines[0], "", *lines[1:], json.dumps({"text": ""}))
    assert read(path) == TEXTS


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"body": TEXTS * 700, "id": range(2100)})
    pyarrow.parquet.write_table(table, path, row_group_size=500)
    assert read(path, field="body") == TEXTS * 700
    [fault] = read(path)
    assert "has no column 'text' (its columns: body, id); use data.field=NAME" in fault
    [fault] = read(path, field="id")
    assert "column 'id' is no text but int64" in fault
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
    assert read(path)[::2] == ["a", "b"] and "row 2: column 'text' is null" in read(path)[1]
    path.write_bytes(b"PAR1 but not really")
    assert "cannot be read as parquet" in read(path)[0]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "noext"])
@pytest.mark.parametrize("size", [4, 7, 64])
def test_text_files_are_one_document_in_pieces(tmp_path, monkeypatch, name, size):
    monkeypatch.setattr(documents, "PIECE_BYTES", size)
    text = "ab\r\n\u2211\u2211\u2211\u2211\u2211\u2211\u2211\n" + "\U0001f600" * 9 + "end"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    pieces = list(read_documents(path, field="text"))
    assert all(isinstance(piece, Document) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == text
    assert pieces[0].is_first and not any(piece.is_first for piece in pieces[1:])


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be a JSON object"),
        ('{"body": "x"}', "line 2: has no field 'text' (its fields: body); use data.field=NAME"),
        ('{"text": 3}', "line 2: field 'text' is no text but int"),
        ('{"text": "\\ud800"}', "line 2: is not UTF-8"),
    ],
)
def test_a_broken_line_is_named_and_the_others_are_read(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    write_lines(path, '{"text": "a"}', line, '{"text": "b"}')
    first, fault, last = read(path)
    assert (first, last) == ("a", "b")
    assert fault.startswith(f"! data.path={path}, {said}") and "data.on_error=skip" in fault


def test_what_is_not_utf8_is_named_by_line(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe4"}\n')
    assert "line 2: is not UTF-8 (byte 0xe4" in read(tmp_path / "a.jsonl")[1]
    monkeypatch.setattr(documents, "PIECE_BYTES", 8)
    (tmp_path / "a.txt").write_bytes(b"fine\nfine\nfine\nb\xe4d\n")
    assert "line 4: is not UTF-8 (byte 0xe4" in read(tmp_path / "a.txt")[-1]


def test_empty_and_broken_files(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).touch()
        assert "the file is empty; leave it out" in read(tmp_path / name)[0]
    write_lines(tmp_path / "b.jsonl.gz", *['{"text": "abcdefgh"}'] * 50)
    (tmp_path / "b.jsonl.gz").write_bytes((tmp_path / "b.jsonl.gz").read_bytes()[:-12])
    assert "cannot be read to its end" in read(tmp_path / "b.jsonl.gz")[-1]
    (tmp_path / "data.arrow").write_bytes(b"ARROW1")
    assert "cannot be read as a stream of arrow batches" in read(tmp_path / "data.arrow")[0]


def test_a_folder_of_datasets_is_read_without_its_notes(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved", num_shards=2)
    files = [file.path for file in named_files([str(tmp_path / "saved")])]
    assert [path.suffix for path in files] == [".arrow", ".arrow"]
    assert [text for path in files for text in read(path)] == TEXTS
    assert "has no column 'body' (its columns: text); use data.field=NAME" in read(files[0], field="body")[0]
    content = files[0].read_bytes()
    files[0].write_bytes(content[: len(content) // 2])
    assert "cannot be read" in read(files[0])[-1]
