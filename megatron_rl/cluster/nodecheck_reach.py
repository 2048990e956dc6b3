"""Whether the nodes of a run can open TCP connections to each other.

Asked before anything is sent over NCCL: a rank that waits there for a node that it cannot reach can only be killed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

CONNECT_S = 5.0


class Listener:
    """A TCP port that answers every connection with a byte, until it is closed."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=512)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, name="nodecheck", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        # Wakes the thread: a socket that somebody waits at goes on listening after its close.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"!")


_listener: Listener | None = None


def listen(address: str) -> int:
    """Open a port on this node's own address, which is returned."""
    global _listener
    _listener = Listener(address)
    return _listener.port


def stop_listening() -> None:
    """Close what `listen` opened."""
    global _listener
    if _listener is not None:
        _listener.close()
    _listener = None


def reach(targets: Sequence[tuple[str, int]]) -> list[str]:
    """Connect to each (address, port); what became of each: "" where it answered."""
    with ThreadPoolExecutor(max_workers=min(32, max(1, len(targets)))) as pool:
        return list(pool.map(_reach, targets))


def _reach(target: tuple[str, int]) -> str:
    try:
        with socket.create_connection(target, timeout=CONNECT_S) as connection:
            return "" if connection.recv(1) == b"!" else "the connection was closed"
    except OSError as error:
        return error.strerror or str(error)
