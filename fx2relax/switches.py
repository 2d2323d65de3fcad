"""Environment variables that switch a part of this package off."""

from __future__ import annotations

import os


def is_on(name: str) -> bool:
    """Whether an environment variable leaves its part on, as it is unless 0, off or false."""
    return os.environ.get(name, "1").lower() not in ("0", "off", "false")
