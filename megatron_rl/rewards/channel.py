"""Python objects over a socket, by descriptor. Does what multiprocessing.connection does, without its imports: they are
most of the time that a reward process takes to start.
"""

from __future__ import annotations

import os
import pickle
import select
from typing import Any

_HEAD = 8
"""Bytes of the length before each message."""


class Channel:
    """One end. The other end's bytes are trusted: they are unpickled."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)

    def send(self, message: object) -> None:
        """Raises BrokenPipeError or ConnectionResetError where the other end is closed."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        left = memoryview(len(body).to_bytes(_HEAD, "little") + body)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def recv(self) -> Any:
        """The next message; waits for it. Raises EOFError where the other end is closed."""
        return pickle.loads(self._read(int.from_bytes(self._read(_HEAD), "little")))

    def poll(self) -> bool:
        """Whether there is something to read, or the other end is closed."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(0))

    def _read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            part = os.read(self._descriptor, min(count, 1 << 20))
            if not part:
                raise EOFError("the other end of the channel is closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
