"""The Flask application: what happens before and after every route, in llama-server's order."""

from __future__ import annotations

import hmac
import logging

from flask import Flask, Response, request

from freetoken.errors import NotReadyError, RequestError
from freetoken.server import cache_routes, info_routes, routes
from freetoken.server.errors import error_response
from freetoken.server.state import ServerState

__all__ = ["build_app"]

log = logging.getLogger(__name__)

_PUBLIC = {"/", "/health", "/v1/health"}
"""Paths that need no API key."""
_QUIET = {"/health", "/v1/health", "/models", "/v1/models", "/props", "/metrics"}
"""Paths that monitors poll; not logged."""
_METHODS = "GET, POST, DELETE, OPTIONS"


def build_app(state: ServerState) -> Flask:
    """The application around a state; it answers 503 until the state is ready."""
    app = Flask("freetoken", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = state.options.max_body_bytes
    app.before_request(lambda: _admit(state))
    app.after_request(_finish)
    app.register_error_handler(Exception, error_response)
    info_routes.register(app, state)
    cache_routes.register(app, state)
    routes.register(app, state)
    return app


def _admit(state: ServerState) -> Response | None:
    """CORS preflights pass; then the model must be ready; then the key must be right."""
    if request.method == "OPTIONS":
        response = Response("", content_type="text/html")
        response.headers["Access-Control-Allow-Credentials"] = "true"
        response.headers["Access-Control-Allow-Methods"] = _METHODS
        response.headers["Access-Control-Allow-Headers"] = "*"
        return response
    if not state.is_ready:
        return error_response(NotReadyError("Loading model"))
    keys = state.options.api_keys
    if keys and request.path not in _PUBLIC and not _has_key(keys):
        log.warning("unauthorized: Invalid API Key")
        return error_response(RequestError("Invalid API Key", http_status=401, error_type="authentication_error"))
    return None


def _has_key(keys: tuple[str, ...]) -> bool:
    """Whether the request carries one of the keys, as a bearer token or in X-Api-Key."""
    given = request.headers.get("Authorization") or request.headers.get("X-Api-Key") or ""
    raw = given.removeprefix("Bearer ").encode("latin-1", "replace")  # as the header's bytes came in
    return any([hmac.compare_digest(raw, key.encode()) for key in keys])


def _finish(response: Response) -> Response:
    """CORS: any origin is echoed, as llama-server does by default."""
    response.headers["Access-Control-Allow-Origin"] = request.headers.get("Origin", "")
    if request.path not in _QUIET:
        log.debug("%s %s %s %d", request.method, request.path, request.remote_addr, response.status_code)
    return response
