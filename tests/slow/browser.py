"""A headless Chromium for the checks of pages, driven without further packages."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# Resolves half a second after the page has loaded, so that plotly can draw.
LOADED = """new Promise((done) => {
  const wait = () => document.readyState === "complete" ? setTimeout(done, 500) : setTimeout(wait, 50);
  wait();
})"""
# Scrolls an element into view and returns the middle of its width, its top and its height.
BOX = """((one) => {{
  one.scrollIntoView({{block: "center", inline: "center"}});
  const box = one.getBoundingClientRect();
  return [box.x + box.width / 2, box.y, box.height];
}})(document.querySelector({selector}))"""


def find_browser() -> str | None:
    """The path of Chromium or Chrome, or the path in CHROMIUM (Debian: apt-get install chromium)."""
    names = ("chromium", "google-chrome", "chromium-headless-shell")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def until(is_true: Callable[[], bool], *, seconds: float = 60.0) -> bool:
    """Whether the condition became true in time. A reloading page raises an error, which counts as not yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(RuntimeError):
            if is_true():
                return True
        time.sleep(0.1)
    return False


class Browser:
    """A headless Chromium, controlled with the DevTools protocol over two pipes (--remote-debugging-pipe).

    origin: the `http://127.0.0.1:PORT` that pages may load from. Without it the browser has no network.
    """

    def __init__(self, path: str, *, profile: Path, origin: str | None = None) -> None:
        self._origin = origin
        reads, self._writes = os.pipe()
        self._reads, writes = os.pipe()
        inner = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (reads, writes)]  # above 3 and 4, which Chromium uses
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--remote-debugging-pipe",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # fmt: skip
        command = [
            "bash",
            "-c",
            'exec "$@" 3<&' + str(inner[0]) + " 4>&" + str(inner[1]),
            "bash",
            path,
            *flags,
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(command, pass_fds=inner, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (reads, writes, *inner):
            os.close(end)
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call(
            "Network.emulateNetworkConditions",
            offline=origin is None,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def open(self, page: Path | str, *, width: int, dark: bool) -> None:
        """Opens a file or an address."""
        self._size(width=width, height=1000)
        self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self._call("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
        self.evaluate(LOADED)

    def _size(self, *, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, code: str) -> Any:
        """Evaluates an expression in the page. Records an exception as a complaint."""
        answer = self._call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            self.complaints.append(f"{code}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def drag(self, selector: str, *, start: float, end: float) -> None:
        """Drags the mouse over an element; start and end are fractions of its height."""
        box = self.evaluate(BOX.format(selector=json.dumps(selector)))
        x, y, height = box
        points = [y + height * (start + (end - start) * part / 4) for part in range(5)]
        for kind, at in (
            ("mousePressed", points[0]),
            *(("mouseMoved", at) for at in points),
            ("mouseReleased", points[-1]),
        ):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=at, button="left", buttons=1, clickCount=1)

    def shoot(self, path: Path) -> None:
        """Saves a screenshot of the page, at most 4000 pixels high."""
        width, height = self.evaluate("[innerWidth, Math.min(4000, document.documentElement.scrollHeight)]")
        self._size(width=width, height=height)
        self.evaluate(LOADED)
        self.evaluate("scrollTo(0, 0)")
        shot = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._call("Browser.close", session=False)
        self._process.wait(timeout=30)
        os.close(self._reads)
        os.close(self._writes)

    def _call(self, method: str, *, session: bool = True, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session and session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            self._note(answer)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._reads, 1 << 20)
            if not piece:
                raise RuntimeError("the browser ended; start it by hand to see why")
            self._buffer += piece
        text, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(text)

    def _note(self, message: dict[str, Any]) -> None:
        """Records errors, warnings and requests as complaints."""
        method, values = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {values['exceptionDetails'].get('exception', {}).get('description')}")
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console: {[one.get('value') for one in values['args']]}")
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            url = values["request"]["url"]
            own = url.startswith("file:") and url.endswith("/report.html")
            own = own if self._origin is None else url.startswith(f"{self._origin}/")
            if not own and not url.startswith(("data:", "blob:", "about:")):
                self.complaints.append(f"request: {url[:200]}")
