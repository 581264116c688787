"""Errors in llama-server's shape: {"error": {"code", "message", "type"}}."""

from __future__ import annotations

import logging
from typing import Any

from flask import Response
from werkzeug.exceptions import HTTPException

from freetoken.errors import ContextExceededError, FreeTokenError
from freetoken.server.json import json_response

__all__ = ["error_body", "error_response"]

log = logging.getLogger(__name__)


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and the inner error object. What we did not raise on purpose is logged and its text kept in."""
    extra: dict[str, Any] = {}
    if isinstance(error, FreeTokenError):
        status, kind, message = error.http_status, error.error_type, str(error)
        if isinstance(error, ContextExceededError):
            extra = {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    elif isinstance(error, HTTPException):
        status, kind, message = _of_http(error)
    else:
        log.error("a request failed", exc_info=error)
        status, kind, message = 500, "server_error", f"internal error: {type(error).__name__}"
    return status, {"code": status, "message": message, "type": kind, **extra}


def error_response(error: Exception) -> Response:
    """The whole answer for an error."""
    status, body = error_body(error)
    return json_response({"error": body}, status)


def _of_http(error: HTTPException) -> tuple[int, str, str]:
    """Status, type and message of what Flask raises: routing and body size. A wrong method counts as no route."""
    if error.code in (404, 405):
        return 404, "not_found_error", "File Not Found"
    if error.code == 413:
        return 413, "invalid_request_error", "the request body is larger than this server accepts"
    status = error.code or 500
    return status, "invalid_request_error" if status < 500 else "server_error", error.description or error.name
