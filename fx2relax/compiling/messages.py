"""What goes through a socket: texts in JSON, each with bytes behind it."""

from __future__ import annotations

import array
import json
import select
import socket
from typing import Any

#: What a write to an end that is closed must not do: send SIGPIPE, which ends a process that has
#: asked for that.
QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)
_SIZE = 8


class Ended(ConnectionError):
    """The other side has closed its end, or ended."""


def send(channel: socket.socket, text: Any, content: bytes = b"") -> None:
    """Send a value that JSON has, and bytes.

    Raises:
        OSError: the other side is gone, or takes nothing within the channel's time limit.
    """
    said = json.dumps(text).encode()
    sizes = len(said).to_bytes(_SIZE, "little") + len(content).to_bytes(_SIZE, "little")
    channel.sendall(sizes + said, QUIETLY)
    channel.sendall(content, QUIETLY)


def is_ready(channel: socket.socket, seconds: float) -> bool:
    """Whether there is something to receive, or the end of it, within a time."""
    poll = select.poll()  # `select` does not take the numbers of many open files
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def hand(control: socket.socket, file: int) -> None:
    """Hand the number of an open file to the other side, with one byte.

    Raises:
        OSError: the other side is gone.
    """
    # `socket.send_fds` takes flags, and does not use them.
    handed = array.array("i", [file])
    control.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handed)], QUIETLY)


def receive(channel: socket.socket) -> tuple[Any, bytes]:
    """The value and the bytes that the other side has sent.

    Raises:
        Ended: it will send no more.
        OSError: nothing came within the channel's time limit.
    """
    sizes = _exactly(channel, 2 * _SIZE)
    said = _exactly(channel, int.from_bytes(sizes[:_SIZE], "little"))
    content = _exactly(channel, int.from_bytes(sizes[_SIZE:], "little"))
    return json.loads(said), content


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise Ended("the other side has closed its end")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
