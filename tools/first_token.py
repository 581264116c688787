"""Seconds from starting `ft serve` to the first token of a request that is sent at once and repeated until it is taken.

python tools/first_token.py -m model.gguf [-r 5] [--phases] [-- FLAGS OF ft serve]
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RETRY_S = 0.05
"""More often, and answering that it loads would slow the start."""
GIVE_UP_S = 300.0
"""The very first start on a card compiles its kernels."""


@dataclass(frozen=True)
class Started:
    """A running server and what its first request met. `saw_loading`: a 503 came before the answer."""

    process: subprocess.Popen[str]
    port: int
    seconds: float
    saw_loading: bool
    first_line: bytes


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_line_of_stream(port: int) -> bytes:
    """The first event of a streamed completion; an OSError while nobody listens, HTTPError 503 while loading."""
    body = {"prompt": "ab", "n_predict": 4, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return bytes(answer.readline())


def start(path: Path, flags: Sequence[str] = ()) -> Started:
    """Start a server and wait for its first token. RuntimeError where it ends or does not answer."""
    port = free_port()
    started = time.monotonic()
    command = [sys.executable, "-m", "freetoken", "serve", "-m", str(path), "--port", str(port), "-c", "512", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    saw_loading = False
    while time.monotonic() - started < GIVE_UP_S:
        try:
            line = first_line_of_stream(port)
            return Started(process, port, time.monotonic() - started, saw_loading, line)
        except urllib.error.HTTPError as error:
            saw_loading = json.load(error)["error"]["message"] == "Loading model"
        except OSError:
            if process.poll() is not None:
                break
        time.sleep(RETRY_S)
    process.kill()
    raise RuntimeError(f"no token within {GIVE_UP_S:.0f} s: {process.communicate()[1]}")


def phases(log: str) -> list[str]:
    """The lines that say what took how long."""
    return [line for line in log.splitlines() if re.search(r" took |first token|listening| in [0-9.]+ s$", line)]


def main() -> None:
    """Print the times of some starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--phases", action="store_true", help="print what the log says of each start's phases")
    parser.add_argument("flags", nargs="*", help="for ft serve, after --")
    args = parser.parse_args()
    times = []
    for _ in range(args.repetitions):
        server = start(args.model, [*args.flags, *(["-v"] if args.phases else [])])
        server.process.terminate()
        _, log = server.process.communicate()
        times.append(server.seconds)
        if args.phases:
            print(f"first token after {server.seconds:.2f} s", *phases(log), sep="\n", flush=True)
    spread = f"{min(times):.2f} to {max(times):.2f}"
    print(f"first token after {statistics.median(times):.2f} s (median of {len(times)}, {spread})")


if __name__ == "__main__":
    main()
