"""The exceptions that users meet, each saying what, where and how to mend it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an exported model is loaded where there is no PyTorch
    import torch.fx

REMEDY = (
    'Write one with @fx2relax.converts(...) (CONTRIBUTING.md, "Add an operator"), '
    'or allow calls into PyTorch (on_unsupported="torch").'
)


class Fx2RelaxError(Exception):
    """Base class of every error that this package raises on purpose."""


class InstallationError(Fx2RelaxError, ImportError):
    """A package that this one is built on is missing, too old or broken; names what mends it."""


class OptionError(Fx2RelaxError, ValueError):
    """An option that does not exist, or a value that it does not take."""


class RegistrationError(Fx2RelaxError, ValueError):
    """A converter that cannot be registered: no such target, or a target already taken."""


class ImportFailure(Fx2RelaxError):
    """A node whose Relax form disagrees with PyTorch, or whose converter raised."""


class BuildFailure(Fx2RelaxError):
    """A Relax module that TVM could not lower or build."""


class ArgumentError(Fx2RelaxError, ValueError):
    """An argument of a compiled graph with the wrong shape, dtype, device or kind."""


class KernelFailure(Fx2RelaxError, RuntimeError):
    """A user's kernel raised while it ran; what it raised is the cause."""

    @classmethod
    def of(cls, operators: Sequence[str], error: Exception) -> KernelFailure:
        """The failure of one of some operators' kernels."""
        named = " or ".join(operators)
        return cls(f"the kernel of {named} raised {type(error).__name__}: {error}".rstrip())


class WeightError(Fx2RelaxError, ValueError):
    """Weights that are missing, that nothing takes, or that are of another shape or dtype."""


class ArtifactError(Fx2RelaxError):
    """A saved artifact that cannot be written, read or run here; names the file and the remedy."""


class Unsupported(Fx2RelaxError):
    """Raised by a converter to decline one call; the next route is then tried.

    Args:
        what: the argument or combination that the converter does not take.
    """


class Refused(Unsupported):
    """Raised by a converter for a call that PyTorch refuses; PyTorch then raises its own error.

    Args:
        what: the argument or combination that PyTorch does not take.
    """


@dataclass(frozen=True)
class MissingOp:
    """One operator without a route: its name, its uses and the first place of use."""

    name: str
    uses: int
    where: str
    reason: str = ""


class UnsupportedOpError(Fx2RelaxError):
    """Operators that have no converter and no decomposition; lists all of them at once."""

    def __init__(self, missing: Iterable[MissingOp]) -> None:
        self.missing = tuple(missing)
        count = len(self.missing)
        noun, verb = ("operator", "has") if count == 1 else ("operators", "have")
        width = max((len(m.name) for m in self.missing), default=0)
        lines = [f"{count} {noun} in this graph {verb} no Relax converter"]
        for m in self.missing:
            uses = f"{m.uses} use" + ("" if m.uses == 1 else "s")
            reason = f"   ({m.reason})" if m.reason else ""
            lines.append(f"  {m.name:<{width}} {uses:<7} {m.where}{reason}".rstrip())
        lines.append(REMEDY)
        super().__init__("\n".join(lines))


def source_line(node: torch.fx.Node) -> str:
    """Where in the user's source a node comes from: ``model.py:41   y = x.erfinv()``.

    Returns an empty string for a graph that was captured without stack traces.
    """
    trace = node.meta.get("stack_trace")
    if not trace:
        return ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        if line.startswith("File "):
            path, _, rest = line[len("File ") :].partition(", line ")
            number = rest.split(",")[0]
            name = path.strip('"').rsplit("/", 1)[-1]
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{name}:{number}   {code}".rstrip()
    return ""


def target_name(target: object) -> str:
    """A target's name as users know it: ``aten.add.Tensor``, ``torch.relu``, ``nn.Linear``."""
    import torch

    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, str):
        return f"Tensor.{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", repr(target))
    return f"{module}.{name}" if module else str(name)


def missing_ops(nodes: Iterable[tuple[torch.fx.Node, str]]) -> list[MissingOp]:
    """Group nodes without a route by target, in order of first use."""
    uses: Counter[str] = Counter()
    first: dict[str, tuple[str, str]] = {}
    for node, reason in nodes:
        name = target_name(node.target)
        uses[name] += 1
        first.setdefault(name, (source_line(node), reason))
    return [MissingOp(name, uses[name], *first[name]) for name in first]
