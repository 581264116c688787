"""Server-sent events as llama-server frames them, from a running job."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from flask import Response

from freetoken.server.answers import Answer, Json
from freetoken.server.errors import error_body
from freetoken.server.generation import Begin, Choice, Final, Piece, Progress, Step
from freetoken.server.job import Item, Job
from freetoken.server.json import dumps

__all__ = ["FLUSH_HEADERS", "stream_response"]

log = logging.getLogger(__name__)

FLUSH_HEADERS = "freetoken.flush_headers"
"""WSGI environment key: whether `listen` sends status and headers before the first chunk is there."""

_DONE = b"data: [DONE]\n\n"
_PING = b":\n\n"


def frame(data: Json) -> bytes:
    """One event."""
    return f"data: {dumps(data)}\n\n".encode()


def stream_response(job: Job, answer: Answer, ping_interval_s: int) -> Response:
    """The streamed answer of a job that has begun. Raises the job's error where it fails before anything is sent."""
    try:
        first = job.first()
    except BaseException:
        job.close()
        raise
    response = Response(_chunks(job, answer, first, ping_interval_s), content_type="text/event-stream")
    response.headers["X-Accel-Buffering"] = "no"
    response.call_on_close(job.close)
    return response


def _chunks(job: Job, answer: Answer, first: Item, ping_interval_s: int) -> Iterator[bytes]:
    timeout_s = float(ping_interval_s) if ping_interval_s > 0 else None
    item: Item | None = first
    try:
        while True:
            if item is None:
                yield _PING
            else:
                chunk = b"".join(frame(data) for step in item[1] for data in _events(answer, item[0], step))
                if chunk:
                    yield chunk
            if not job.is_open:
                break
            item = job.next(timeout_s)
    except Exception as error:
        yield frame({"error": error_body(error)[1]})
        return
    if answer.ends_with_done:
        yield _DONE


def _events(answer: Answer, choice: Choice, step: Step) -> list[Json]:
    match step:
        case Piece():
            return answer.piece(choice, step)
        case Final():
            return answer.end_of_stream(choice, step)
        case Progress():
            return answer.progress(choice, step)
        case Begin():
            return []
