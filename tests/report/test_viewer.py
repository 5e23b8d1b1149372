"""`python -m ztk.report profile`: the address for the browser, and the one file that it can fetch."""

import threading
import urllib.error
import urllib.request

import pytest

from ztk.report.__main__ import main
from ztk.report.viewer import PERFETTO, open_trace


def test_perfetto_fetches_the_trace_of_a_rank_and_nothing_else(tmp_path):
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank1.trace.json.gz").write_bytes(b"trace")
    (tmp_path / "profile" / "rank1.memory.pickle").write_bytes(b"memory")
    fetched, browser = [], urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def fetch(address):
        page, _, place = address.partition("/#!/?url=")
        assert page == PERFETTO
        with pytest.raises(urllib.error.HTTPError, match="404"):
            browser.open(place.replace("trace.json.gz", "memory.pickle"), timeout=30)
        with browser.open(place, timeout=30) as answer:
            fetched.append((answer.headers["Access-Control-Allow-Origin"], answer.read()))

    browsers = []

    def show(address):
        browsers.append(threading.Thread(target=fetch, args=(address,)))
        browsers[0].start()

    open_trace(tmp_path, rank=1, port=0, show=show)
    browsers[0].join(timeout=30)
    assert fetched == [(PERFETTO, b"trace")]


def test_the_error_of_a_run_without_a_trace_has_the_way_to_record_one(tmp_path, capsys):
    assert main(["profile", str(tmp_path)]) == 2
    assert "train.profile=10:12" in capsys.readouterr().err
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank0.trace.json.gz").touch()
    assert main(["profile", str(tmp_path), "--rank", "3"]) == 2
    assert "it has rank0" in capsys.readouterr().err
