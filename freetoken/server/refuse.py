"""The two ways of refusing a field."""

from __future__ import annotations

from freetoken.errors import RequestError

__all__ = ["invalid", "not_supported"]


def invalid(message: str) -> RequestError:
    """What the client sent is wrong: HTTP 400."""
    return RequestError(message)


def not_supported(message: str) -> RequestError:
    """A sound request for something that we do not have: HTTP 501."""
    return RequestError(message, http_status=501, error_type="not_supported_error")
