"""What `fx2relax doctor` looks at.

Nothing here imports PyTorch or TVM in the process of the command: `probes` does, in another one,
so that the worst of installations ends in a line of the report.
"""

from __future__ import annotations

from collections.abc import Callable

from fx2relax.doctor import machine, storage, switches, tools, trial, versions
from fx2relax.doctor.findings import Finding
from fx2relax.doctor.running import Probed, probe

__all__ = ["Finding", "examine"]

Check = Callable[[Probed], list[Finding]]
_CHECKS: dict[str, Check] = {
    "versions": versions.check,
    "compilers": tools.check,
    "processor": machine.check_processor,
    "GPU": machine.check_gpu,
    "cache": storage.check,
    "switches": switches.check,
    "trial": trial.check,
}


def examine(step: Callable[[str], None] = lambda what: None) -> list[Finding]:
    """Look at everything.

    Args:
        step: told what begins.
    """
    probed = probe(step)
    found = []
    for section, check in _CHECKS.items():
        step(section)
        try:
            some = check(probed)
        except Exception as error:  # a check that fails is a finding, and no end of the others
            why = f"this check failed: {type(error).__name__}: {error}"
            some = [Finding.warning(section, why, "report it, with this line")]
        found += [finding.of(section) for finding in some]
    return found
