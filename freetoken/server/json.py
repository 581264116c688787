"""JSON in and out, as strict and as compact as llama-server's."""

from __future__ import annotations

import json
import struct
from typing import Any, NoReturn

from flask import Request as HttpRequest
from flask import Response

from freetoken.errors import RequestError

__all__ = ["dumps", "f32", "json_response", "parse_body"]

JSON_TYPE = "application/json; charset=utf-8"
_BOM = b"\xef\xbb\xbf"


def dumps(data: Any) -> str:
    """Compact JSON, UTF-8 as it is."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_response(data: Any, status: int = 200) -> Response:
    """An answer with a JSON body."""
    return Response(dumps(data), status=status, content_type=JSON_TYPE)


def f32(value: float) -> float:
    """The value as fp32 holds it; llama-server keeps its settings in fp32 and prints them so."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def parse_body(request: HttpRequest) -> dict[str, Any]:
    """The request's JSON object, whatever its content type says. A BOM is skipped.

    Raises RequestError for bytes that are not UTF-8, malformed JSON (NaN and lone surrogates too) and anything but an
    object.
    """
    raw = request.get_data(cache=False).removeprefix(_BOM)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the request body is not UTF-8: byte 0x{raw[error.start]:02x} at {error.start}") from None
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the request body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except UnicodeEncodeError:
        raise RequestError("the request body is not JSON: a string holds half of a surrogate pair") from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, or NaN
        raise RequestError(f"the request body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError("the request body must be a JSON object")
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
