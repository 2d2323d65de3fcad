"""Random programs, compiled and in eager.

    python tests/sweep_programs.py --count 1000

Prints each program that differs, with its seed; ``--seed`` runs one again and prints it.
``--dynamic`` runs each at three sizes with one compiled function.
"""

from __future__ import annotations

from collections import Counter

import click
from programs.check import Verdict, check
from programs.generate import generate
from rich.console import Console
from workers import each


def one(seed: int, length: int, dynamic: bool) -> Verdict:
    """Generate and check the program of a seed."""
    return check(generate(seed, length, dynamic), dynamic)


@click.command(help=__doc__)
@click.option("--count", default=1000, show_default=True)
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--seed", type=int, help="This program alone, in this process.")
@click.option("--length", default=12, show_default=True, help="Lines of a program, at most.")
@click.option("--dynamic", is_flag=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--seconds", default=180.0, show_default=True, help="Time that one may take.")
def main(
    count: int,
    first: int,
    seed: int | None,
    length: int,
    dynamic: bool,
    workers: int,
    seconds: float,
) -> None:
    console = Console(width=160, highlight=False, markup=False)
    if seed is not None:
        console.print(generate(seed, length, dynamic).describe())
        verdict = one(seed, length, dynamic)
        console.print(verdict.error or "as eager")
        _show([verdict], console)
        raise SystemExit(1 if verdict.error else 0)
    verdicts: list[Verdict] = []

    def done(verdict: Verdict) -> None:
        verdicts.append(verdict)
        if verdict.error:
            whose = " (PyTorch's own: aot_eager differs too)" if verdict.upstream else ""
            text = " ".join(verdict.error.split())[:400]
            console.print(f"seed {verdict.seed}{whose}: {text}")

    pieces = [(s, length, dynamic) for s in range(first, first + count)]
    each(one, pieces, _failed, done, title="programs", workers=workers, seconds=seconds)
    _show(verdicts, console)
    raise SystemExit(1 if any(v.error and not v.upstream for v in verdicts) else 0)


def _failed(piece: tuple[int, int, bool], why: str) -> Verdict:
    return Verdict(piece[0], why)


def _show(verdicts: list[Verdict], console: Console) -> None:
    calls: Counter[str] = Counter()
    for verdict in verdicts:
        calls.update(verdict.torch_calls)
        for reason in verdict.recompiled:
            console.print(f"seed {verdict.seed} compiled again: {reason}")
        for reason in verdict.fallbacks:
            console.print(f"seed {verdict.seed}: {reason[:300]}")
    wrong = sum(bool(v.error) for v in verdicts)
    upstream = sum(v.upstream for v in verdicts)
    console.print(
        f"{len(verdicts) - wrong} of {len(verdicts)} programs do what eager does; "
        f"of the others {upstream} differ under aot_eager too"
    )
    if calls:
        console.print("torch calls: " + ", ".join(f"{n} {c}" for n, c in calls.most_common()))


if __name__ == "__main__":
    main()
