"""The watcher of connections: calls back once when the other end leaves, and only for the one that left."""

from __future__ import annotations

import os
import socket
import threading
import time

from freetoken.server.watcher import Watcher


def wait_for(called: list[str], expected: list[str]) -> None:
    deadline = time.monotonic() + 5
    while called != expected:
        assert time.monotonic() < deadline, called
        time.sleep(0.002)


def test_calls_back_once_and_not_after_unwatch() -> None:
    watcher = Watcher()
    called: list[str] = []
    ends = [socket.socketpair() for _ in range(3)]
    keys = [watcher.watch(ours, lambda i=i: called.append(str(i))) for i, (ours, _) in enumerate(ends)]  # type: ignore[misc]
    watcher.unwatch(keys[0])
    for _, theirs in ends[:2]:
        theirs.close()
    wait_for(called, ["1"])
    watcher.unwatch(keys[1])
    ends[2][1].shutdown(socket.SHUT_WR)
    wait_for(called, ["1", "2"])
    watcher.close()
    for pair in ends:
        for end in pair:
            end.close()


def test_a_new_client_with_the_number_of_one_that_left_lives() -> None:
    watcher = Watcher()
    watcher._lock = threading.RLock()  # type: ignore[assignment]  # this test holds it across calls
    called: list[str] = []
    left, peer = socket.socketpair()
    new, new_peer = socket.socketpair()
    key = watcher.watch(left, lambda: called.append("left"))
    with watcher._lock:
        peer.close()
        time.sleep(0.1)  # the watcher has seen it and waits for the lock
        watcher.unwatch(key)
        os.dup2(new.fileno(), left.fileno())
        watcher.watch(left, lambda: called.append("new"))
    time.sleep(0.1)
    assert called == []
    new_peer.close()
    wait_for(called, ["new"])
    watcher.close()
    left.close()
    new.close()
