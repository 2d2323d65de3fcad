"""What a user asks of tuning, checked on the way in."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from fx2relax.errors import OptionError

#: What ``mode="max-autotune"`` means.
SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Devices to measure on: a tracker of TVM's RPC, ``host:port``, and their key there."""

    tracker: str
    key: str


@dataclasses.dataclass(frozen=True)
class Tune:
    """What ``options={"tune": {...}}`` holds.

    Attributes:
        seconds: how long the kernels of a graph are tuned; 0 only uses what is known.
        database: a folder to read and write; the cache's when left out.
        fleet: where candidates are measured; here when left out.
    """

    seconds: float = SECONDS
    database: str | None = None
    fleet: Fleet | None = None

    @classmethod
    def make(cls, given: Any) -> Tune:
        """Wishes from a dict; raises OptionError for what is none."""
        if not isinstance(given, Mapping):
            raise OptionError(f"option tune={given!r}; it takes a dict such as {{'seconds': 60}}")
        known = ("seconds", "database", "tracker", "key")
        unknown = [key for key in given if key not in known]
        if unknown:
            raise OptionError(
                f"option tune: unknown {', '.join(map(repr, unknown))}; it takes {', '.join(known)}"
            )
        seconds = given.get("seconds", SECONDS)
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not 0 <= seconds < float("inf"):
            raise OptionError(
                f"option tune: seconds={seconds!r}; it takes a number of seconds, 0 to use what "
                "is known already"
            )
        database = given.get("database")
        if database is not None and not isinstance(database, (str, os.PathLike)):
            raise OptionError(f"option tune: database={database!r}; it takes the path of a folder")
        place = None if database is None else os.path.abspath(os.path.expanduser(database))
        if place is not None and os.path.exists(place) and not os.path.isdir(place):
            raise OptionError(f"option tune: database={database!r} is a file; it takes a folder")
        return cls(float(seconds), place, fleet(given.get("tracker"), given.get("key")))


def fleet(tracker: Any, key: Any) -> Fleet | None:
    """Where to measure; raises OptionError where one of the two is missing or wrong."""
    if tracker is None and key is None:
        return None
    if not isinstance(tracker, str) or not re.fullmatch(r"\S+:\d{1,5}", tracker):
        raise OptionError(
            f"option tune: tracker={tracker!r}; it takes host:port, as `python -m "
            "tvm.exec.rpc_tracker` prints it"
        )
    if not isinstance(key, str) or not key:
        raise OptionError(
            f"option tune: key={key!r}; it takes the key that the devices were started with "
            "(`python -m tvm.exec.rpc_server --tracker HOST:PORT --key KEY`)"
        )
    return Fleet(tracker, key)
