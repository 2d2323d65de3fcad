"""One line of the report."""

from __future__ import annotations

import dataclasses
from typing import Any

OK, WARNING, BROKEN, SKIPPED = "ok", "warning", "broken", "skipped"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found of one thing.

    Attributes:
        name: of what.
        status: ``ok``; ``warning``, where something is slower or less than it could be;
            ``broken``, where models cannot be compiled; ``skipped``, where it could not be tried.
        text: what was found, in a line.
        mend: the command that mends it; empty where there is nothing to mend.
        section: the part of the report.
        facts: the same for programs to read.
    """

    name: str
    status: str
    text: str
    mend: str = ""
    section: str = ""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def ok(cls, name: str, text: str, **facts: Any) -> Finding:
        """All is well."""
        return cls(name, OK, text, facts=facts)

    @classmethod
    def warning(cls, name: str, text: str, mend: str, **facts: Any) -> Finding:
        """It works, and could be better."""
        return cls(name, WARNING, text, mend, facts=facts)

    @classmethod
    def broken(cls, name: str, text: str, mend: str, **facts: Any) -> Finding:
        """Models cannot be compiled."""
        return cls(name, BROKEN, text, mend, facts=facts)

    @classmethod
    def skipped(cls, name: str, text: str) -> Finding:
        """It was not tried, for a reason that another finding gives."""
        return cls(name, SKIPPED, text)

    def of(self, section: str) -> Finding:
        """The same, in a part of the report."""
        return dataclasses.replace(self, section=section)
