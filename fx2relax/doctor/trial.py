"""Whether a small model compiles, agrees with eager, and is found on disk again."""

from __future__ import annotations

from fx2relax.doctor.findings import Finding
from fx2relax.doctor.running import Probed
from fx2relax.doctor.tools import mend_native
from fx2relax.installed import wanted

_AGAIN = f"pip install --force-reinstall {wanted('torch')} {wanted('apache-tvm')}"


def check(probed: Probed) -> list[Finding]:
    """The model without and with the cache."""
    missing = [s for s in ("torch", "tvm", "package") if s in probed.errors]
    if missing:
        text = f"not tried without {missing[0]}"
        return [Finding.skipped("small model", text), Finding.skipped("stored program", text)]
    return [_model(probed), _stored(probed)]


def _model(probed: Probed) -> Finding:
    name, facts = "small model", probed.get("model")
    if "model" in probed.errors:
        return Finding.broken(name, f"does not compile: {probed.errors['model']}", _AGAIN)
    if not facts:
        return Finding.skipped(name, "it was not reached")
    if not facts["right"]:
        text = f"differs from eager by {facts['error']:.1e}"
        return Finding.broken(name, text, _AGAIN, error=facts["error"])
    if not facts["graphs"]:
        text = "; ".join(facts["warnings"]) or "no graph of it was compiled"
        return Finding.broken(name, text, _AGAIN)
    text = f"agrees with eager ({facts['error']:.1e}), compiled in {facts['seconds']:.1f} s"
    return Finding.ok(name, text, error=facts["error"], seconds=facts["seconds"])


def _stored(probed: Probed) -> Finding:
    name, facts = "stored program", probed.get("disk")
    if "disk" in probed.errors:
        return Finding.warning(name, f"fails: {probed.errors['disk']}", "export FX2RELAX_CACHE=0")
    if not facts:
        return Finding.skipped(name, "it was not reached")
    if not facts["right"]:
        text = "differs from eager"
        return Finding.broken(name, text, "export FX2RELAX_CACHE=0")
    if not facts["hits"]:
        said = " ".join("; ".join(facts["warnings"]).split())
        text = f"is not found again: {said or 'programs are not stored without a linker'}"
        return Finding.warning(name, text, mend_native(said))
    return Finding.ok(name, "is found again and agrees with eager")
