"""`python -m ztk.report profile`: opens a run's trace in Perfetto, which runs in the browser and fetches the file from this machine."""

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PERFETTO = "https://ui.perfetto.dev"
PORT = 9001  # the only port from which Perfetto's page may fetch
FOLDER = "profile"  # in the run folder


def open_trace(run: str | Path, *, rank: int = 0, port: int = PORT, show: Callable[[str], object]) -> None:
    """Opens the trace of one rank. Returns when the page has fetched it. show: opens an address.

    Raises:
        ValueError: the run has no trace of the rank, or the port is in use.
    """
    trace = Path(run, FOLDER, f"rank{rank}.trace.json.gz")
    if not trace.is_file():
        found = ", ".join(path.name.split(".")[0] for path in sorted(trace.parent.glob("rank*.trace.json.gz")))
        fix = f"it has {found}" if found else "record one by `python run.py train.profile=10:12`"
        raise ValueError(f"{trace}: no such trace; {fix}")
    try:
        server = _Server(("127.0.0.1", port), trace)
    except OSError as error:
        raise ValueError(f"port {port} of 127.0.0.1: {error.strerror}; end the program that uses it") from None
    with server:
        address = f"{PERFETTO}/#!/?url=http://127.0.0.1:{server.server_port}/{trace.name}"
        show(address)
        while not server.is_fetched:
            server.handle_request()


class _Server(HTTPServer):
    """Serves one file to Perfetto's page."""

    def __init__(self, address: tuple[str, int], trace: Path) -> None:
        self.trace, self.is_fetched = trace, False
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Sends the trace. Any other path is 404."""
        trace = self.server.trace
        if self.path != f"/{trace.name}":
            self.send_error(404)
            return
        content = trace.read_bytes()
        self.send_response(200)
        self.send_header("Access-Control-Allow-Origin", PERFETTO)
        self.send_header("Content-Type", "application/gzip")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.server.is_fetched = True

    def log_message(self, *_: object) -> None:
        """Logs nothing."""
