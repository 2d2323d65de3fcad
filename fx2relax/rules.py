"""Shape rules: what a kernel takes and gives, in named sizes.

One rule says the same of PyTorch's tensors, real and fake, and of Relax's: sizes are ints, SymInts
or TIR expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch

from fx2relax import dtypes
from fx2relax.compat import Analyzer, is_prim_expr, tirx
from fx2relax.errors import ArgumentError
from fx2relax.size_terms import evaluate, names, prim
from fx2relax.spec import Tensor

_SCALARS = (int, float, bool)


@dataclass(frozen=True)
class ExternFunction:
    """What a kernel takes and gives.

    Attributes:
        args: an entry an argument: a `Tensor`, whose sizes are ints, names, text over names
            (``"2*n + 1"``), `tirx.Var` and expressions over them; ``int``, ``float`` or ``bool``,
            for a scalar; or a name, for an int which is the size of that name. None may be passed
            for a tensor.
        ret: a `Tensor`, or a tuple of them for several results. Each of its sizes is an int, or
            made of sizes that the arguments show.

    Raises:
        ValueError: a size of `ret`, or one in an expression, that no argument shows.
    """

    args: Sequence[Tensor | type | str]
    ret: Tensor | Sequence[Tensor]

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", tuple(self.args))
        if not isinstance(self.ret, Tensor):
            object.__setattr__(self, "ret", tuple(self.ret))
        shown: set[Any] = set()
        for arg in self.args:
            if isinstance(arg, Tensor):
                shown |= {s for s in arg.shape if _is_bare(s)}
            elif isinstance(arg, str):
                shown.add(arg)
            elif arg not in _SCALARS:
                raise ValueError(f"{arg!r} is no Tensor, int, float, bool or name of a size")
        for tensor in (*self.args, *self.results):
            for size in tensor.shape if isinstance(tensor, Tensor) else ():
                for name in names(size):
                    if name not in shown:
                        raise ValueError(f"no argument shows the size {name}, which {tensor} has")

    @property
    def results(self) -> tuple[Tensor, ...]:
        """The results, one or several."""
        return (self.ret,) if isinstance(self.ret, Tensor) else tuple(self.ret)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The arguments that are tensors."""
        return tuple(arg for arg in self.args if isinstance(arg, Tensor))

    @overload
    def for_dtypes(self, dtypes: Mapping[str, str]) -> dict[str, ExternFunction]: ...

    @overload
    def for_dtypes(self, dtypes: Sequence[str]) -> list[ExternFunction]: ...

    def for_dtypes(
        self, dtypes: Mapping[str, str] | Sequence[str]
    ) -> dict[str, ExternFunction] | list[ExternFunction]:
        """The same rule for several dtypes: the tensors of the first one's dtype take each.

        Args:
            dtypes: TVM's names; or dtype -> symbol, where each has a symbol of its own.

        Returns:
            a rule a dtype; or symbol -> rule, which is what an entry of ``functions`` may be.
        """
        first = (*self.tensors, *self.results)[0].dtype

        def of(item: Any, dtype: str) -> Any:
            same = isinstance(item, Tensor) and item.dtype == first
            return replace(item, dtype=dtype) if same else item

        def rule(dtype: str) -> ExternFunction:
            results = [of(r, dtype) for r in self.results]
            args = [of(a, dtype) for a in self.args]
            return ExternFunction(args, results[0] if isinstance(self.ret, Tensor) else results)

        if isinstance(dtypes, Mapping):
            return {symbol: rule(dtype) for dtype, symbol in dtypes.items()}
        return [rule(dtype) for dtype in dtypes]


@dataclass(frozen=True)
class Seen:
    """A tensor as a rule sees it; `shape` of ints, SymInts or TIR expressions."""

    shape: tuple[Any, ...]
    dtype: str


def seen(value: Any) -> Any:
    """A PyTorch tensor as a rule sees it; anything else as it is."""
    if isinstance(value, torch.Tensor):
        known = dtypes.has_tvm(value.dtype)
        dtype = dtypes.to_tvm(value.dtype) if known else str(value.dtype).removeprefix("torch.")
        return Seen(tuple(value.shape), dtype)
    return value


def key_of(values: Sequence[Any]) -> Any:
    """All that a match depends on, of real tensors and numbers."""
    return tuple(
        [
            (v.dtype, v.shape)
            if isinstance(v, torch.Tensor)
            else (type(v), v if isinstance(v, int) else None)
            for v in values
        ]
    )


class Matched:
    """A rule and what it was matched with.

    Attributes:
        rule: the rule.
        sizes: what its names and variables are.
        doubts: the arguments, by their places, with sizes that could not be compared, and the
            shapes that they must have.
    """

    def __init__(self, rule: ExternFunction, sizes: dict[Any, Any]) -> None:
        self.rule = rule
        self.sizes = sizes
        self.doubts: dict[int, list[Any]] = {}

    def results(self) -> list[Seen]:
        """The shapes and dtypes of the results.

        Raises:
            ArgumentError: (a ValueError) a size that only an argument shows which was left out.
        """
        try:
            return [
                Seen(tuple(evaluate(size, self.sizes.__getitem__) for size in r.shape), r.dtype)
                for r in self.rule.results
            ]
        except KeyError as error:
            raise ArgumentError(f"the size {error} is that of a tensor left out") from None


def match(
    rules: Sequence[ExternFunction], values: Sequence[Any], what: str, names: Sequence[str]
) -> Matched:
    """Find the rule for some arguments, and its sizes.

    Args:
        rules: one a combination of dtypes.
        values: the arguments; tensors as `Seen`.
        what: the operator's name, for errors.
        names: the arguments' names.

    Raises:
        ArgumentError: (a ValueError) an argument of the wrong kind, dtype, rank or size; the
            message names it.
    """
    first = rules[0]
    if len(values) != len(first.args):
        raise ArgumentError(f"{what} takes {len(first.args)} arguments, not {len(values)}")
    for name, arg, value in zip(names, first.args, values, strict=True):
        _check_kind(arg, value, f"{what}: argument {name!r}")
    rule = _of_dtypes(rules, values, what, names)
    return _bound(rule, values, what, names)


def _check_kind(arg: Any, value: Any, where: str) -> None:
    if isinstance(arg, Tensor):
        if value is not None and not isinstance(value, Seen):
            raise ArgumentError(f"{where} is {type(value).__name__}, not a tensor")
        return
    if is_prim_expr(value):
        return
    kinds: Any = {
        bool: (bool, torch.SymBool),
        float: (int, float, torch.SymInt, torch.SymFloat),
    }.get(arg, (int, torch.SymInt))
    if not isinstance(value, kinds) or (isinstance(value, bool) and arg is not bool):
        wanted = "int" if isinstance(arg, str) else arg.__name__
        raise ArgumentError(f"{where} is {type(value).__name__}, not {wanted}")


def _of_dtypes(
    rules: Sequence[ExternFunction], values: Sequence[Any], what: str, names: Sequence[str]
) -> ExternFunction:
    def wrong(rule: ExternFunction) -> list[int]:
        return [
            i
            for i, (arg, value) in enumerate(zip(rule.args, values, strict=True))
            if isinstance(value, Seen) and isinstance(arg, Tensor) and value.dtype != arg.dtype
        ]

    for rule in rules:
        if not wrong(rule):
            return rule
    if len(rules) == 1:
        at = wrong(rules[0])[0]
        wanted = rules[0].args[at]
        assert isinstance(wanted, Tensor)
        raise ArgumentError(
            f"{what}: argument {names[at]!r} is {values[at].dtype}, it takes {wanted.dtype}"
        )
    given = [(name, v.dtype) for name, v in zip(names, values, strict=True) if isinstance(v, Seen)]
    options = dict.fromkeys(", ".join(t.dtype for t in rule.tensors) for rule in rules)
    raise ArgumentError(
        f"{what}: {', '.join(f'{n!r} is {d}' for n, d in given)}; it takes "
        f"{' or '.join(f'({o})' for o in options)}"
    )


def _bound(rule: ExternFunction, values: Sequence[Any], what: str, names: Sequence[str]) -> Matched:
    sizes: dict[Any, Any] = {}
    found = Matched(rule, sizes)
    for name, arg, value in zip(names, rule.args, values, strict=True):
        if isinstance(arg, str):
            sizes.setdefault(arg, value)
        if not isinstance(value, Seen) or not isinstance(arg, Tensor):
            continue
        if len(value.shape) != len(arg.shape):
            raise ArgumentError(
                f"{what}: argument {name!r} has {len(value.shape)} axes, it takes "
                f"{len(arg.shape)}: {_spelled(arg.shape)}"
            )
        for wanted, size in zip(arg.shape, value.shape, strict=True):
            if _is_bare(wanted):
                sizes.setdefault(wanted, size)
    for place, (arg, value) in enumerate(zip(rule.args, values, strict=True)):
        if isinstance(arg, str):
            said = f"{what}: argument {names[place]!r} is {value}, and the size {arg!r} "
            said += str(sizes[arg])
            _equal(sizes[arg], value, lambda said=said: said)  # type: ignore[misc]
        if isinstance(value, Seen) and isinstance(arg, Tensor):
            _check_sizes(found, place, arg, value, f"{what}: argument {names[place]!r}")
    return found


def _check_sizes(found: Matched, place: int, arg: Tensor, value: Seen, where: str) -> None:
    try:
        expected = [evaluate(size, found.sizes.__getitem__) for size in arg.shape]
    except KeyError as error:
        raise ArgumentError(f"{where}: the size {error} is that of a tensor left out") from None

    def wrong() -> str:
        return (
            f"{where} has the shape {_spelled(value.shape)}, it takes {_spelled(arg.shape)}, here "
            f"{_spelled(expected)}"
        )

    for size, wanted in zip(value.shape, expected, strict=True):
        if not _equal(size, wanted, wrong):
            found.doubts[place] = expected


def _equal(a: Any, b: Any, wrong: Callable[[], str]) -> bool:
    """Whether two sizes are known to be equal: False where TIR cannot tell before the call.

    Raises:
        ArgumentError: (a ValueError) they are not, which `wrong` says.
    """
    if is_prim_expr(a) or is_prim_expr(b):
        if is_prim_expr(a) and is_prim_expr(b) and a.same_as(b):
            return True
        return bool(Analyzer().can_prove(tirx.EQ(prim(a), prim(b))))
    equal = a == b
    if isinstance(equal, torch.SymBool):
        # A size that depends on data is compared when it is there; others are guarded.
        torch._check_value(equal, wrong)
    elif not equal:
        raise ArgumentError(wrong())
    return True


def _is_bare(size: Any) -> bool:
    return isinstance(size, tirx.Var) or (isinstance(size, str) and size.isidentifier())


def _spelled(shape: Sequence[Any]) -> str:
    sizes = ", ".join(str(size) for size in shape)
    return f"({sizes},)" if len(shape) == 1 else f"({sizes})"
