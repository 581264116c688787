"""`ft ctl`: the caches of a running server, asked for and rebuilt over HTTP."""

from __future__ import annotations

import argparse
import http.client
import json
import time
from typing import Any

from freetoken.cli.flag import Flag, add_flags, given, real, whole
from freetoken.errors import FreeTokenError, OptionError

__all__ = ["add_arguments", "run", "status_text"]

Json = dict[str, Any]
ACTIONS = ("status", "rebuild")
_MIB = 1 << 20
_SERVER = (
    Flag(("--host",), "host", "where the server listens (127.0.0.1)", str, "HOST"),
    Flag(("--port",), "port", "its port (8080)", whole(1, 65535), "PORT", "LLAMA_ARG_PORT"),
    Flag(("--api-key",), "api_key", "its key, if it has one", str, "KEY", "LLAMA_API_KEY"),
    Flag(("--timeout",), "timeout", "seconds to wait for an answer (600)", whole(1), "N"),
    Flag(("-o", "--output"), "output", "text or json", str, "FORMAT"),
)
_CHANGES = (
    Flag(("--moe-cache-size",), "moe_cache_size", "slots for experts of all layers together", whole(1)),
    Flag(("--moe-cache-rate",), "moe_cache_rate", "the same as a share of all experts", real(0, 1), "R"),
    Flag(("--moe-cache-auto",), "moe_cache_auto", "as many slots as the card has room for"),
    Flag(("-c", "--ctx-size"), "n_ctx", "context of all slots together, in tokens", whole(1)),
    Flag(("--kv-pages",), "kv_pages", "the same in pages of 256 tokens", whole(1)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `ft ctl`."""
    parser.add_argument("action", nargs="?", metavar="ACTION", help=" or ".join(ACTIONS))
    add_flags(parser, "the server", _SERVER)
    add_flags(parser, "what rebuild changes", _CHANGES)


def run(args: argparse.Namespace) -> int:
    """Ask, or have rebuilt, and print what is there. Raises what the server refuses."""
    change = given(args, [flag.dest for flag in _CHANGES])
    if args.action not in ACTIONS:
        raise OptionError(f"ft ctl {args.action or ''}: expected {' or '.join(ACTIONS)} (see ft ctl --help)")
    if args.output not in (None, "text", "json"):
        raise OptionError(f"argument -o: {args.output!r}, expected text or json")
    if bool(change) != (args.action == "rebuild"):
        flags = ", ".join(flag.names[-1] for flag in _CHANGES)
        raise OptionError(f"ft ctl {args.action}: {'give one of' if not change else 'only rebuild takes'} {flags}")
    found = _ask(args, "POST" if change else "GET", f"/v1/cache/{args.action}", change or None)
    print(json.dumps(found, indent=2) if args.output == "json" else status_text(found))
    return 0


def _ask(args: argparse.Namespace, method: str, path: str, body: Json | None) -> Json:
    host, port = args.host or "127.0.0.1", args.port or 8080
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    connection = http.client.HTTPConnection(host, port, timeout=args.timeout or 600)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FreeTokenError(f"http://{host}:{port}{path}: no answer of a FreeToken server: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        message = answer.get("error", {}).get("message", answer) if isinstance(answer, dict) else answer
        raise FreeTokenError(f"the server answers {response.status}: {message}")
    found: Json = answer
    return found


def status_text(status: Json) -> str:
    """A status as lines."""
    slots, counts, kv, last = (status[name] for name in ("slots", "statistics", "kv", "last_rebuild"))
    lines = [f"backend     {status['backend']} ({status['reason']})"]
    if slots is not None:
        share, size = 100 * slots["resident_share"], slots["n_bytes"] / _MIB
        lines.append(f"slots       {slots['n_slots']} of {slots['n_experts']} experts ({share:.1f}%), {size:.0f} MiB")
        for each in slots["classes"]:
            kind = ", passing through" if each["is_passing"] else ""
            lines.append(
                f"            {each['n_slots']} of {each['n_experts']} experts of {each['n_layers']} layers, "
                f"{each['slot_bytes']} bytes each{kind}"
            )
    if counts is not None:
        rate = "" if counts["hit_rate"] is None else f" ({100 * counts['hit_rate']:.1f}%)"
        lines += [
            f"statistics  since the {counts['began_with']}, {time.time() - counts['since']:.0f} s ago",
            f"            {counts['hits']} hits{rate}, {counts['misses']} misses: {counts['fills']} filled "
            f"({counts['filled_bytes'] / _MIB:.1f} MiB), {counts['cpu_experts']} on the CPU",
        ]
    lines.append(
        f"context     {kv['n_pages']} pages of {kv['page_tokens']} tokens, {kv['n_held']} held, {kv['n_free']} free; "
        f"sequences of up to {kv['n_ctx']} tokens"
    )
    if status["is_rebuilding"]:
        lines.append("rebuild     under way")
    if last is not None:
        result = "done" if last["error"] is None else f"failed: {last['error']}"
        lines.append(f"last        {last['asked']}: {result}, {last['seconds']:.2f} s")
    return "\n".join(lines)
