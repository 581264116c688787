"""The caches of a running server: GET /v1/cache/status, POST /v1/cache/rebuild."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from flask import Flask, Response, request

from freetoken.rebuild import CacheChange, CacheStatus
from freetoken.server.fields import INT32_MAX, has, json_type, read_bool
from freetoken.server.json import json_response, parse_body
from freetoken.server.refuse import invalid
from freetoken.server.state import ServerState

__all__ = ["register"]

Json = dict[str, Any]
_FIELDS = ("moe_cache_size", "moe_cache_rate", "moe_cache_auto", "n_ctx", "kv_pages")


def register(app: Flask, state: ServerState) -> None:
    """Add the routes to the application."""

    def status() -> Response:
        return json_response(_status_json(state.generator.cache_status()))

    def rebuild() -> Response:
        change = read_change(parse_body(request))
        started = time.monotonic()
        found = _status_json(state.generator.rebuild(change))
        return json_response(found | {"seconds": time.monotonic() - started})

    app.add_url_rule("/v1/cache/status", "cache status", status, methods=["GET"])
    app.add_url_rule("/v1/cache/rebuild", "cache rebuild", rebuild, methods=["POST"])


def read_change(body: Json) -> CacheChange:
    """What a rebuild shall change. Raises RequestError for fields that are wrong or exclude each other."""
    unknown = sorted(set(body) - set(_FIELDS))
    if unknown:
        raise invalid(f"Field '{unknown[0]}' is unknown: expected some of {', '.join(_FIELDS)}")
    is_auto = read_bool(body, "moe_cache_auto", False)
    rate = _number(body, "moe_cache_rate", 1, is_whole=False)
    change = CacheChange(
        moe_cache_size=_whole(body, "moe_cache_size"),
        moe_cache_rate=rate,
        moe_cache_auto=is_auto,
        n_ctx=_whole(body, "n_ctx"),
        kv_pages=_whole(body, "kv_pages"),
    )
    for names in (_FIELDS[:3], _FIELDS[3:]):
        given = [name for name in names if has(body, name) and body[name] is not False]
        if len(given) > 1:
            raise invalid(f"Field '{given[1]}' excludes '{given[0]}': give one of them")
    if not change.has_slots and not change.has_kv:
        raise invalid(f"nothing to rebuild: give one of {', '.join(_FIELDS)}")
    return change


def _whole(body: Json, name: str) -> int | None:
    value = _number(body, name, INT32_MAX, is_whole=True)
    return None if value is None else int(value)


def _number(body: Json, name: str, most: int, *, is_whole: bool) -> float | None:
    """A number above 0, at most `most`; a fraction is not cut off, since nobody means one."""
    if not has(body, name):
        return None
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        kind = "a whole number" if is_whole else "number"
        raise invalid(f"Field '{name}': type must be {kind}, but is {json_type(value)}")
    if not 0 < value <= most:
        raise invalid(f"Field '{name}': Value must be between 0 < value <= {most}, but got {value}")
    return value if is_whole else float(value)


def _status_json(status: CacheStatus) -> Json:
    return dataclasses.asdict(status)
