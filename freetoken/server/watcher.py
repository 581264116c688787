"""Notices clients that leave: one thread waits for POLLRDHUP on the sockets of running requests.

No WSGI server looks at a socket while the application computes, so without this a closed connection would be seen at
the next write, or never where nothing is streamed. A client that only shuts down its sending side counts as gone, as
in llama-server.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable

__all__ = ["Watcher"]

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Watcher:
    """Calls back once, from its own thread, when a watched socket's other end closes.

    `watch` and `unwatch` may be called from any thread while the watcher waits; epoll allows that.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._epoll.register(self._woken.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def watch(self, sock: socket.socket, callback: Callable[[], None]) -> int:
        """Watch a socket; returns the key for `unwatch`, which must be called before the socket is closed."""
        fd = sock.fileno()
        with self._lock:
            self._callbacks[fd] = callback
            self._epoll.register(fd, _GONE)
        return fd

    def unwatch(self, key: int) -> None:
        """Stop watching; nothing happens where the callback was called already."""
        with self._lock:
            if self._callbacks.pop(key, None) is not None:
                self._epoll.unregister(key)

    def close(self) -> None:
        """End the thread."""
        self._wake.close()
        self._thread.join()
        self._epoll.close()
        self._woken.close()

    def _run(self) -> None:
        while True:
            self._epoll.poll()
            with self._lock:
                # Asked again: what was seen before the lock may be unwatched by now, its number a new client's.
                for fd, _ in self._epoll.poll(0):
                    if fd == self._woken.fileno():
                        return
                    self._epoll.unregister(fd)
                    self._callbacks.pop(fd)()
