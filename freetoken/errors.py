"""The tree of exceptions. Every message says where, what was found, what was expected and what to do.

FreeTokenError
├── OptionError            a flag or option with a bad value              exit code 2
├── ModelFileError         the file is not a usable model file            exit code 1
│   ├── UnsupportedModelError   a sound file that we cannot run           exit code 1
│   └── MissingShardError       one file of a split model is not there    exit code 1
├── RequestError           what a client sent is wrong                    HTTP 4xx
│   └── ContextExceededError    prompt longer than the context            HTTP 400
├── NotReadyError          the model is still loading                     HTTP 503
└── EngineError            the engine failed while working for a request  HTTP 500
    ├── PinRefusedError    the system does not lock this host memory for the GPU
    └── DeviceLostError    the GPU failed for good: the process must be started again
"""

from __future__ import annotations

__all__ = [
    "ContextExceededError",
    "DeviceLostError",
    "EngineError",
    "FreeTokenError",
    "MissingShardError",
    "ModelFileError",
    "NotReadyError",
    "OptionError",
    "PinRefusedError",
    "RequestError",
    "UnsupportedModelError",
]


class FreeTokenError(Exception):
    """Anything that we raise on purpose; `exit_code` is for the command line, the other two for HTTP."""

    exit_code = 1
    http_status = 500
    error_type = "server_error"


class OptionError(FreeTokenError):
    """A flag, environment variable or option has a value that cannot be used."""

    exit_code = 2


class ModelFileError(FreeTokenError):
    """The model file is missing, damaged or of another format."""


class UnsupportedModelError(ModelFileError):
    """The file is sound but asks for an architecture, type or feature that we do not have."""


class MissingShardError(ModelFileError):
    """A file of a split model is missing; the message names it."""


class RequestError(FreeTokenError):
    """A request that cannot be served as sent. `http_status` and `error_type` follow llama-server."""

    http_status = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, *, http_status: int | None = None, error_type: str | None = None) -> None:
        super().__init__(message)
        if http_status is not None:
            self.http_status = http_status
        if error_type is not None:
            self.error_type = error_type


class ContextExceededError(RequestError):
    """The prompt does not fit the context."""

    error_type = "exceed_context_size_error"

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"the request has {n_prompt_tokens} prompt tokens, more than the context of {n_ctx} tokens holds "
            "(context_length_exceeded): shorten it or start the server with a larger -c"
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class NotReadyError(FreeTokenError):
    """The model is not loaded yet."""

    http_status = 503
    error_type = "unavailable_error"


class EngineError(FreeTokenError):
    """The engine failed; the request that it worked for gets this."""


class PinRefusedError(EngineError):
    """The system does not lock a range of host memory for the GPU; others may still be, and work goes on without."""


class DeviceLostError(EngineError):
    """The GPU has failed in a way that leaves no call of it usable in this process."""
