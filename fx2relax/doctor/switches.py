"""The environment variables that this package reads, and those that look as if it did."""

from __future__ import annotations

import difflib
import os
import re

from fx2relax.doctor.findings import Finding
from fx2relax.doctor.running import Probed

_ON_OFF = r"0|1|on|off|true|false"
#: Each variable with what it may be set to.
KNOWN = {
    "FX2RELAX_BACKGROUND": _ON_OFF,
    "FX2RELAX_COMPILE_PROCESS": _ON_OFF,
    "FX2RELAX_CACHE": _ON_OFF,
    "FX2RELAX_CACHE_DIR": r".+",
    "FX2RELAX_CUDA": _ON_OFF,
    "FX2RELAX_CACHE_SIZE": r"\s*\d+\s*[KMG]?(i?B)?\s*",
    "FX2RELAX_NATIVE": r"0|1",
    "FX2RELAX_NEVER_SLOWER": _ON_OFF,
}


def check(probed: Probed) -> list[Finding]:
    """Every FX2RELAX_* that is set."""
    given = {k: v for k, v in sorted(os.environ.items()) if k.startswith("FX2RELAX_")}
    if not given:
        return [Finding.ok("FX2RELAX_*", "none is set")]
    return [_switch(name, value) for name, value in given.items()]


def _switch(name: str, value: str) -> Finding:
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, 1)
        text = f"is set to {value!r}, and nothing reads it"
        text += f"; is {near[0]} meant?" if near else ""
        return Finding.warning(name, text, f"unset {name}", value=value)
    if not re.fullmatch(KNOWN[name], value, re.IGNORECASE):
        text = f"is set to {value!r}, which it does not take"
        return Finding.warning(name, text, f"unset {name}", value=value)
    return Finding.ok(name, value, value=value)
