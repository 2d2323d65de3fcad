"""A program and its graph in PyTorch, kernel by kernel and node by node.

After each kernel the nodes that it stands for are run in PyTorch, and what they give is compared
and put in the place of what the kernel gave: each kernel is judged by its own work, and none by the
errors of those before it. Values are let go of when nothing needs them any more.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from fx2relax.compat import TVMTensor
from fx2relax.torch_calls import is_random

#: The largest error of a value, over the largest value of its tensor, that is rounding.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
# Elements of tensors that are compared at a time.
_PIECE = 1 << 19
# A difference keeps what it takes to see it again.
_KEPT = 3
_LAST = (0, 3, 1, 2)  # from channels last to channels first


@dataclass
class Difference:
    """One tensor that is not PyTorch's.

    Attributes:
        place: the kernel's number in its program; None for a result of the program.
        node: the name of the node that it should be.
        error: the largest error, over the largest value; infinite where shapes, dtypes, NaN or
            infinities differ.
        reason: the same in words.
        inputs: what the kernel's nodes read, by the names of the nodes that gave it; of the first
            few differences.
    """

    place: int | None
    node: str
    error: float
    reason: str
    inputs: dict[str, Any] | None = None


class Lockstep:
    """One run of a program beside its graph.

    Args:
        graph: the ATen graph.
        symbols: what the program calls, in order.
        names: for each of these calls, the node and the index of the output that it makes, or None
            where it makes something in between.
        groups: for each of these calls, the names of all nodes that it computes.
        tolerance: in the place of `TOLERANCE`.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        symbols: Sequence[str],
        names: Sequence[tuple[str, int] | None],
        groups: Sequence[Sequence[str]],
        tolerance: float | None = None,
    ) -> None:
        self._nodes = list(graph.graph.nodes)
        self._by_name = {node.name: node for node in self._nodes}
        self._interpreter = torch.fx.Interpreter(graph, garbage_collect_values=False)
        self._names, self._groups = list(names), groups
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, symbol in enumerate(symbols):
            self._places[symbol].append(place)
        self._tolerance = tolerance
        self.differences: list[Difference] = []
        #: How many kernels were compared.
        self.compared = 0
        self.failure: Exception | None = None

    def run(self, program: Any, call: Callable[[Sequence[Any]], Any], arguments: Any) -> Any:
        """Call a `Program`, by way of `call`, and compare what its virtual machine tells of.

        Returns:
            what the program returned, with PyTorch's values from the first kernel on.
        """
        self._begin(arguments)
        with program.watched(self._told):
            results = call(arguments)
        self._compare_results(results)
        self._interpreter.env.clear()
        return results

    def _begin(self, arguments: Sequence[Any]) -> None:
        env = self._interpreter.env
        env.clear()
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        env.update(zip(placeholders, arguments, strict=True))
        self._users = Counter({node: len(node.users) for node in self._nodes})
        self._ran: set[torch.fx.Node] = set()
        self._waiting = {known[0] for known in self._names if known is not None}
        self._next = {symbol: list(places) for symbol, places in self._places.items()}

    def _told(self, function: Any, symbol: str, before: bool, result: Any, *arguments: Any) -> int:
        if before or self.failure is not None:
            return 0
        places = self._next.get(symbol)
        if places:
            place = places.pop(0)
            known = self._names[place]
            try:
                if known is not None:
                    made = result if isinstance(result, TVMTensor) else arguments[-1]
                    self._compare(place, *known, made)
            except Exception as error:  # the machine would hand it on as another one
                self.failure = error
        return 0

    def _compare(self, place: int, name: str, index: int, made: Any) -> None:
        if not isinstance(made, TVMTensor):
            return
        node, got = self._by_name[name], from_dlpack(made)
        if is_random(node.target):  # another draw would be another number
            self._interpreter.env[node] = _laid(got, node.meta["val"]).clone()
            self._done(node)
            return
        value = self._value(node)
        leaves = pytree.tree_leaves(value)
        expected = leaves[index] if index < len(leaves) else None
        if isinstance(expected, torch.Tensor) and expected.layout is torch.strided:
            self.compared += 1
            laid = _laid(got, expected)
            self._judge(place, name, laid, expected)
            if laid.shape == expected.shape and laid.dtype == expected.dtype:
                laid.copy_(expected)
        self._done(node)

    def _done(self, node: torch.fx.Node) -> None:
        self._waiting.discard(node.name)
        self._forget(node)

    def _value(self, node: torch.fx.Node) -> Any:
        """What a node gives in PyTorch; whatever it needs is run before."""
        env = self._interpreter.env
        needed, stack = set(), [node]
        while stack:
            each = stack.pop()
            if each not in needed and each not in env:
                needed.add(each)
                stack += each.all_input_nodes
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for each in self._nodes:
                if each in needed:
                    env[each] = self._interpreter.run_node(each)
                    if each not in self._ran:
                        self._ran.add(each)
                        self._users.subtract(each.all_input_nodes)
        value = env[node]
        for each in needed:
            for read in (each, *each.all_input_nodes):
                if read is not node:
                    self._forget(read)
        return value

    def _forget(self, node: torch.fx.Node) -> None:
        done = self._users[node] <= 0 and node.name not in self._waiting
        if done and node.op != "placeholder":
            self._interpreter.env.pop(node, None)

    def _compare_results(self, results: Sequence[Any]) -> None:
        output = self._nodes[-1]
        nodes = pytree.tree_leaves(output.args[0])
        for node, got in zip(nodes, results, strict=True):
            if not isinstance(node, torch.fx.Node) or not isinstance(got, torch.Tensor):
                continue
            drawn = any(is_random(n.target) for n in _ancestors(node))
            if self.failure is None and not drawn and got.layout is torch.strided:
                expected = self._value(node)
                if isinstance(expected, torch.Tensor):
                    self._judge(None, node.name, got, expected)

    def _judge(
        self, place: int | None, name: str, got: torch.Tensor, expected: torch.Tensor
    ) -> None:
        error, reason = difference(got, expected)
        if not error:
            return
        allowed = self._tolerance
        if allowed is None:
            allowed = TOLERANCE.get(expected.dtype, TOLERANCE[torch.float32])
        if error > allowed:
            own = [name] if place is None else self._groups[place]
            inputs = self._inputs(own)
            if error < math.inf and _is_rounding(got, expected, list(inputs.values())):
                return
            kept = inputs if len(self.differences) < _KEPT else None
            self.differences.append(Difference(place, name, error, reason, kept))

    def _inputs(self, own: Sequence[str]) -> dict[str, Any]:
        """What nodes read that is not made by one of them."""
        nodes = [self._by_name[name] for name in own]
        read = dict.fromkeys(r for node in nodes for r in node.all_input_nodes if r not in nodes)
        values = {node.name: self._value(node) for node in read}
        return {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }


def difference(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, str]:
    """The largest error over the largest expected value, and what it is in words."""
    inf = math.inf
    if got.shape != expected.shape:
        return inf, f"shape {tuple(got.shape)}, and not {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return inf, f"{got.dtype}, and not {expected.dtype}"
    if not expected.numel():
        return 0.0, ""
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = got != expected
        count = int(wrong.sum())
        return (inf, _words(count, wrong, got, expected)) if count else (0.0, "")
    apart = largest = 0.0
    where = 0, got, expected
    start = 0
    for one, other in _pieces(got, expected):
        finite = other.isfinite()
        odd = (one.isfinite() != finite) | (one.isnan() != other.isnan())
        odd |= ~finite & ~other.isnan() & (one != other)
        if odd.any():
            return inf, _words(int(odd.sum()), odd, one, other, start)
        found = _apart(one, other).max().item()
        if found > apart:
            apart, where = found, (start, one, other)
        largest = max(largest, other.nan_to_num(0.0, 0.0, 0.0).abs_().max().item())
        start += len(one) if one.dim() else 0
    if not apart:
        return 0.0, ""
    start, one, other = where
    marked = _apart(one, other) == apart
    return apart / largest if largest else apart, _words(0, marked, one, other, start)


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far two tensors are apart where they are finite."""
    return (one - other).abs_().nan_to_num_(0.0, 0.0, 0.0)


def _pieces(
    got: torch.Tensor, expected: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors side by side: what is made of them on the way is as large as a piece."""
    if not expected.dim():
        yield got, expected
        return
    rows = max(1, _PIECE * len(expected) // expected.numel())
    yield from zip(got.split(rows), expected.split(rows), strict=True)


def _is_rounding(got: torch.Tensor, expected: torch.Tensor, inputs: Sequence[Any]) -> bool:
    """Whether a difference is what rounding leaves of sums whose terms cancel out."""
    floats = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    terms = [x.abs().sum().item() / max(expected.numel(), 1) for x in floats if x.numel()]
    largest = max((x.abs().max().item() for x in floats if x.numel()), default=0.0)
    apart = (got - expected).abs().nan_to_num().max().item()
    return bool(apart <= 4 * torch.finfo(expected.dtype).eps * max([largest, *terms]))


def _words(
    count: int, marked: torch.Tensor, got: torch.Tensor, expected: torch.Tensor, first: int = 0
) -> str:
    place = tuple(int(i) for i in marked.nonzero()[0])
    start = f"{count} of {expected.numel()} elements, such as " if count else ""
    shown = [place[0] + first, *place[1:]] if place else []
    return f"{start}{got[place].item()} at {shown}, and not {expected[place].item()}"


def _laid(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """A kernel's tensor in the order of axes of the node's."""
    if got.shape != expected.shape and got.dim() == expected.dim() == 4:
        turned = got.permute(_LAST)
        return turned if turned.shape == expected.shape else got
    return got


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    seen, stack = set(), [node]
    while stack:
        each = stack.pop()
        if each not in seen:
            seen.add(each)
            stack += each.all_input_nodes
    return seen
