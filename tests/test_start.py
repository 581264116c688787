"""From the command to the first token: the real `ft serve` in its own process."""

from __future__ import annotations

import signal
from pathlib import Path

from tools import first_token, tiny_models

FIRST_TOKEN_S = 4.0


def test_first_token_and_clean_end(tmp_path: Path) -> None:
    server = first_token.start(tiny_models.write(tmp_path / "tiny.gguf", "llama"))
    try:
        assert server.first_line.startswith(b"data: {")
        assert server.saw_loading
        assert server.seconds < FIRST_TOKEN_S, f"{server.seconds:.2f} s from the command to the first token"
        server.process.send_signal(signal.SIGINT)
        _, log = server.process.communicate(timeout=10)
        assert server.process.returncode == 0, log
        assert "Traceback" not in log
    finally:
        server.process.kill()
        server.process.communicate()
