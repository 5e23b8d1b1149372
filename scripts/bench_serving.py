"""Tokens per second of a server under 32 clients, with grammars and with as many tokens without.

    python scripts/bench_serving.py FOLDER
    python scripts/bench_serving.py FOLDER --rounds 5 --tokens 96 --set weights=int8

Starts `run.py task=serve` with the model of FOLDER on a free port. Per round each client sends one request with a grammar, then one with a new
prompt of equal length that answers with as many tokens. Prints medians of tokens per second and of tokens per CPU second of the server's
processes, and the ratios of their pairs; the goal is 0.9. Answers that have ended are checked against the grammar.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
CLIENTS, GOAL = 32, 0.9
PATTERN = r"([A-Z][a-z]{2,9} ){12}[0-9]{3}-[0-9]{4}"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 6, "maxItems": 8},
        "kind": {"enum": ["person", "company", "other"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}},
    "regex": {"guided_regex": PATTERN},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """counts: tokens of each client's answer. seconds: of the wall clock. cpu_seconds: of the server's processes."""

    counts: list[int]
    seconds: float
    cpu_seconds: float

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens per second and per CPU second."""
        return sum(self.counts) / self.seconds, sum(self.counts) / self.cpu_seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model with its tokenizer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer at most")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, str(ROOT / "run.py"), "task=serve", f"inference.model={options.folder}", "serve.port=0"]
        line += [f"hydra.run.dir={folder}/run", "inference.max_sequences=32", *options.set]
        server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            Console().print(asyncio.run(measure(_address(server), pid=server.pid, options=options)))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    return 0


def _address(server: subprocess.Popen) -> str:
    """Waits for the line that names it. Raises RuntimeError if the server ends before."""
    assert server.stdout is not None, "a pipe"
    for line in server.stdout:
        if found := re.search(r"answers on (http\S+)", line):
            return found[1]
    raise RuntimeError(f"the server ended with exit code {server.wait()}; its error stands above")


async def measure(url: str, *, pid: int, options: argparse.Namespace) -> Table:
    """All rounds of each grammar, the first of them discarded."""
    table = Table(title=f"{CLIENTS} clients, median of {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for column in ("grammar", "tokens/s", "without", "ratio", "tokens/CPU s", "without", "ratio", "goal"):
        table.add_column(column, justify="right")
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=CLIENTS)) as client:
        for name, grammar in GRAMMARS.items():
            pairs = []
            for number in range(options.rounds + 1):
                guided = await _round(client, f"A{number}", fields=[grammar] * CLIENTS, tokens=options.tokens, pid=pid)
                free = [{"min_tokens": count, "max_tokens": count, "ignore_eos": True} for count in guided.counts]
                pairs.append((guided, await _round(client, f"B{number}", fields=free, tokens=options.tokens, pid=pid)))
            row = []
            for place in range(2):
                rates = [(first.rates[place], second.rates[place]) for first, second in pairs[1:]]
                own, other = (statistics.median(part) for part in zip(*rates, strict=True))
                ratio = statistics.median(first / second for first, second in rates)
                row += [f"{own:.1f}", f"{other:.1f}", f"{ratio:.2f}"]
            table.add_row(name, *row, str(GOAL))
    return table


async def _round(client: httpx.AsyncClient, prefix: str, *, fields: list[dict], tokens: int, pid: int) -> Round:
    """One request of every client, at the same time."""
    bodies = [
        {"prompt": f"{prefix} {number:02}: a person is described.\n", "max_tokens": tokens, "temperature": 0.8}
        | {"seed": number}
        | own
        for number, own in enumerate(fields)
    ]
    began, cpu = time.perf_counter(), _cpu_seconds(pid)
    replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    seconds, cpu = time.perf_counter() - began, _cpu_seconds(pid) - cpu
    for reply, body in zip(replies, bodies, strict=True):
        reply.raise_for_status()
        _check(reply.json()["choices"][0], body=body)
    return Round(
        counts=[reply.json()["usage"]["completion_tokens"] for reply in replies], seconds=seconds, cpu_seconds=cpu
    )


def _check(choice: dict, *, body: dict) -> None:
    """Raises ValueError if an answer that has ended is not in its grammar."""
    if choice["finish_reason"] != "stop":
        return
    if "guided_regex" in body and not re.fullmatch(PATTERN, choice["text"]):
        raise ValueError(f"{choice['text']!r} does not match {PATTERN}")
    if "response_format" in body and set(json.loads(choice["text"])) != set(SCHEMA["required"]):
        raise ValueError(f"{choice['text']!r} is not of the schema")


def _cpu_seconds(pid: int) -> float:
    """Of a process and its descendants that run."""
    ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return ticks / os.sysconf("SC_CLK_TCK") + sum(_cpu_seconds(int(child)) for child in children)


if __name__ == "__main__":
    sys.exit(main())
