"""Who changes LLVM's options compiles alone: they belong to the process, and not to a thread.

TVM sets the options of a target when it begins to generate code, and puts back what it found when
it ends. Two that do so at once would take each other's options for what was there before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from fx2relax.locks import own


class _Door:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside: set[object] = set()
        self.alone: object | None = None

    def enter(self, who: object, alone: bool) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.alone is None and not (alone and self.inside))
            self.inside.add(who)
            if alone:
                self.alone = who

    def leave(self, who: object) -> None:
        with self.changed:
            self.inside.discard(who)
            if self.alone is who:
                self.alone = None
            self.changed.notify_all()


_door: _Door = own(sys.modules[__name__], "_door", _Door)


@contextlib.contextmanager
def generating(target: Any) -> Iterator[None]:
    """Inside a ``with`` block LLVM generates code for a target; it is not entered twice."""
    door, who = _door, object()
    try:
        door.enter(who, "cl-opt" in dict(target.export()))
        yield
    finally:  # also where Ctrl-C comes on the way in
        door.leave(who)
