"""The HTTP server around the application: cheroot with a thread for every busy connection.

Headers of a stream go out before its first chunk is there, and TLS handshakes run off the accepting thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cheroot import wsgi
from cheroot.makefile import MakeFile
from cheroot.server import HeaderReader, HTTPConnection, HTTPRequest
from cheroot.ssl import Adapter
from cheroot.workers.threadpool import ThreadPool
from flask import Flask

from freetoken.errors import FreeTokenError, OptionError
from freetoken.options import ServerOptions
from freetoken.server.chunked import ChunkedBody
from freetoken.server.routes import CLIENT_SOCKET
from freetoken.server.sse import FLUSH_HEADERS

__all__ = ["HttpServer"]

log = logging.getLogger(__name__)

_MIN_THREADS = 4
_MAX_THREADS = 2048
_BACKLOG = 512
_SHUTDOWN_S = 1
_KNOCK_S = 0.2
_HEADER_BYTES = 64 * 1024


class _Pool(ThreadPool):
    """A thread for every connection that has a request: streams never keep /health waiting."""

    def put(self, obj: Any) -> None:
        pool: Any = self  # what cheroot's stubs leave out
        pool._clear_dead_threads()
        if self.idle <= pool._queue.qsize() and len(pool._threads) < _MAX_THREADS:
            pool._threads.append(pool._spawn_worker())
        super().put(obj)


class _HeaderReader(HeaderReader):
    """As cheroot's, which fails on a continuation line without a header and takes any integer of Python's as length."""

    def __call__(self, rfile: Any, hdict: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
        """Raises ValueError, which cheroot answers with 400."""
        try:
            headers: dict[bytes, bytes] = super().__call__(rfile, hdict)
        except UnboundLocalError:
            raise ValueError("Illegal continuation line.") from None
        if not headers.get(b"Content-Length", b"0").isdigit():
            raise ValueError("Malformed Content-Length Header.")
        return headers


class _Request(HTTPRequest):
    header_reader = _HeaderReader()


class _Connection(HTTPConnection):
    RequestHandlerClass = _Request


class _Gateway(wsgi.Gateway_10):
    """Gives the application the client's socket, and sends a stream's headers before its first chunk is there."""

    def get_environ(self) -> dict[str, Any]:  # type: ignore[override]
        if self.req.chunked_read:
            self.req.rfile = ChunkedBody(self.req.conn.rfile)
        environ: dict[str, Any] = super().get_environ()  # type: ignore[no-untyped-call]
        environ[CLIENT_SOCKET] = self.req.conn.socket
        return environ

    def respond(self) -> None:
        response: Iterable[bytes] = self.req.server.wsgi_app(self.env, self.start_response)
        body = self.req.rfile
        if isinstance(body, ChunkedBody) and not body.is_complete:
            self.req.close_connection = True  # the rest of the body must not be read as the next request
        try:
            if self.env.get(FLUSH_HEADERS):
                self.req.ensure_headers_sent()
            for chunk in response:
                if chunk:
                    self.write(chunk)
        finally:
            self.req.ensure_headers_sent()
            close = getattr(response, "close", None)
            if close is not None:
                close()


class _Tls(Adapter):
    """TLS whose handshake runs in the connection's own thread, so that a silent client holds up nobody."""

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__(str(certificate), str(key))
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            self.context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise OptionError(f"--ssl-cert-file {certificate}, --ssl-key-file {key}: cannot be used: {error}") from None

    def bind(self, sock: socket.socket) -> socket.socket:
        return sock

    def wrap(self, sock: socket.socket) -> tuple[socket.socket, dict[str, str]]:
        wrapped = self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return wrapped, self.get_environ()

    def get_environ(self) -> dict[str, str]:
        return {"wsgi.url_scheme": "https", "HTTPS": "on"}

    def makefile(self, sock: socket.socket, mode: str = "r", bufsize: int = -1) -> Any:
        return MakeFile(sock, mode, bufsize)


class _Server(wsgi.Server):
    """cheroot's server, logging through `logging`."""

    ConnectionClass = _Connection
    keep_alive_conn_limit = None  # type: ignore[assignment]
    max_request_header_size = _HEADER_BYTES

    def bind(self, family: int, type: int, proto: int = 0) -> socket.socket:
        """As cheroot's, but a socket that cannot be bound is closed."""
        sock: socket.socket = self.prepare_socket(
            self.bind_addr, family, type, proto, self.nodelay, self.ssl_adapter, self.reuse_port
        )
        try:
            self.socket = self.bind_socket(sock, self.bind_addr)  # type: ignore[no-untyped-call]
        except OSError:
            sock.close()
            raise
        self.bind_addr = self.resolve_real_bind_addr(sock)  # type: ignore[no-untyped-call]
        return sock

    def stop(self) -> None:
        """As cheroot's, but the accepting thread is woken instead of waited for."""
        server: Any = self  # what cheroot's stubs leave out
        server._connections._stop_requested = True
        with contextlib.suppress(OSError), socket.socket(self.socket.family) as knock:
            knock.settimeout(_KNOCK_S)
            knock.connect(self.socket.getsockname())
        super().stop()

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        """A client's broken connection or bad TLS is no news; anything else with a traceback is an error of ours."""
        is_ours = traceback and not isinstance(sys.exc_info()[1], OSError)
        log.log(level if is_ours else logging.DEBUG, "%s", msg, exc_info=is_ours)


class HttpServer:
    """Listens from construction on; `start` begins to serve.

    Raises OptionError for a host or certificate that cannot be used, FreeTokenError for a port in use.
    """

    def __init__(self, app: Flask, options: ServerOptions) -> None:
        host = options.host
        if not host:
            raise OptionError("--host: the address is empty, expected one such as 127.0.0.1, or 0.0.0.0 for all")
        is_unix = host.endswith(".sock")
        self._server = _Server(
            host if is_unix else (host, options.port),
            app,
            server_name="llama.cpp",
            request_queue_size=_BACKLOG,
            timeout=options.timeout_s,
            shutdown_timeout=_SHUTDOWN_S,
        )
        self._server.gateway = _Gateway
        self._server.requests = _Pool(self._server, min=options.n_threads_http or _MIN_THREADS)
        if options.ssl_cert_file is not None and options.ssl_key_file is not None:
            self._server.ssl_adapter = _Tls(options.ssl_cert_file, options.ssl_key_file)
        try:
            self._server.prepare()
        except (OSError, UnicodeError) as error:
            raise _bind_error(error, host if is_unix else f"{host}:{options.port}") from None
        scheme = "https" if self._server.ssl_adapter is not None else "http"
        self.port = 0 if is_unix else int(self._server.bind_addr[1])
        name = f"[{host}]" if ":" in host else host
        self.url = f"unix://{host}" if is_unix else f"{scheme}://{name}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve, name="http", daemon=True)

    def start(self) -> None:
        """Serve in threads of its own; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port and end the threads; running requests must have been cancelled before."""
        self._server.stop()
        self._thread.join()


def _bind_error(error: OSError | UnicodeError, address: str) -> FreeTokenError:
    """cheroot folds the reason into its message."""
    text = str(error)
    if f"Errno {errno.EADDRINUSE}]" in text:
        return FreeTokenError(f"couldn't bind to {address}: the port is in use; choose another one with --port")
    reason = text.split("] ", 1)[-1].rstrip(")")
    return FreeTokenError(f"couldn't bind to {address}: {reason}")
