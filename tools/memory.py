"""Resident memory of a real server: before the model is loaded, after, and over many requests.

    python tools/memory.py -m model.gguf [-c 2048] [-r 1000]

Memory is Linux's Rss from smaps, with the pages of the mapped model file counted apart. "Before a model is loaded" is
a process with the port open that has not begun to load. Prints a table and exits with 1 above the bar.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.first_token import free_port

BAR_MB = 450
GROWTH_MB = 8
"""What 1,000 requests may add once the first hundred have filled caches and heaps."""
BASELINE = (
    "import time; from freetoken.cli import serve; from freetoken.options import ServerOptions;"
    "from freetoken.server.app import build_app; from freetoken.server.listen import HttpServer;"
    "from freetoken.server.state import ServerState; o = ServerOptions(port={port});"
    "s = HttpServer(build_app(ServerState(o)), o); s.start(); time.sleep(60)"
)


def resident_mb(pid: int, path: Path) -> tuple[float, float]:
    """(resident memory without the model file's pages, those pages), in MB."""
    own, mapped, is_model = 0, 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_model = line.endswith(path.name)
        elif line.startswith("Rss:"):
            if is_model:
                mapped += int(line.split()[1])
            else:
                own += int(line.split()[1])
    return own * 1024 / 1e6, mapped * 1024 / 1e6


def wait_for(url: str, statuses: tuple[int, ...], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                status = answer.status
        except urllib.error.HTTPError as error:
            status = error.code
        except OSError:
            status = 0
        if status in statuses:
            return
        time.sleep(0.05)
    sys.exit(f"{url} did not answer within {timeout:.0f} s")


def complete(port: int, number: int) -> None:
    """One chat request; every tenth is long and reuses nothing, so that torch prefills it; every third streams."""
    is_long = number % 10 == 0
    text = f"Question {number}: " + "tell me about the sea and the sky. " * (40 if is_long else 1)
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "stream": number % 3 == 0,
        "cache_prompt": not is_long,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def baseline_mb(path: Path) -> float:
    """Resident memory of the server process before it begins to load."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", BASELINE.format(port=port)])
    try:
        wait_for(f"http://127.0.0.1:{port}/health", (503,))
        return resident_mb(process.pid, path)[0]
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("-r", "--requests", type=int, default=1000)
    args = parser.parse_args()
    path = args.model.resolve()
    before = baseline_mb(path)
    port = free_port()
    command = [sys.executable, "-m", "freetoken", "serve", "-m", str(path), "-c", str(args.ctx_size), "-t", "2"]
    server = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", (200,))
        loaded, mapped = resident_mb(server.pid, path)
        rows = [("server, no model", before, 0.0), ("model loaded", loaded, mapped)]
        marks = sorted({min(100, args.requests), args.requests // 2, args.requests})
        after: dict[int, float] = {}
        for number in range(1, args.requests + 1):
            complete(port, number)
            if number in marks:
                own, mapped = resident_mb(server.pid, path)
                after[number] = own
                rows.append((f"after {number} requests", own, mapped))
    finally:
        server.terminate()
        server.wait(20)
    print(f"| {'state':<22} | above the file, MB | of the mapped file, MB |")
    print(f"| {'-' * 22} | {'-' * 18} | {'-' * 22} |")
    for name, own, file_mb in rows:
        print(f"| {name:<22} | {own:18.1f} | {file_mb:22.1f} |")
    growth = after[marks[-1]] - after[marks[0]]
    print(f"largest: {max(after.values()):.1f} MB above the mapped file (bar {BAR_MB}); growth {growth:+.1f} MB")
    return int(max(after.values()) > BAR_MB or growth > GROWTH_MB)


if __name__ == "__main__":
    sys.exit(main())
