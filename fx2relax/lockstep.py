"""A program and its graph in PyTorch, kernel by kernel and node by node.

After each kernel the nodes that it stands for are run in PyTorch, and what they give is compared
and put in the place of what the kernel gave: each kernel is judged by its own work, and none by the
errors of those before it. Where a kernel differs, the nodes before it that no kernel makes (a view,
what a converter returned as it was given) are compared first, each compiled alone: from a wrong one
on, the program's value is what PyTorch goes on with. Values are let go of when nothing needs them
any more.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from fx2relax.compat import TVMTensor
from fx2relax.differences import TOLERANCE, Run, difference, is_rounding, widened
from fx2relax.ordered import draws
from fx2relax.runtime.heap import give_back

log = logging.getLogger("fx2relax")

# A difference keeps what it takes to see it again.
_KEPT = 3
_ROUNDED = {
    torch.ops.aten.round,
    torch.ops.aten.floor,
    torch.ops.aten.ceil,
    torch.ops.aten.trunc,
}
_LAST = (0, 3, 1, 2)  # from channels last to channels first


@dataclass
class Difference:
    """One tensor that is not PyTorch's.

    Attributes:
        place: the kernel's number in its program; None for a value that no kernel makes.
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
        alone: what a node that no kernel makes gives in the program, of what it reads; None where
            that cannot be told.
        tolerance: in the place of `differences.TOLERANCE`.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        symbols: Sequence[str],
        names: Sequence[tuple[str, int] | None],
        groups: Sequence[Sequence[str]],
        alone: Callable[[torch.fx.Node, dict[str, Any]], Any],
        tolerance: float | None = None,
    ) -> None:
        self._nodes = list(graph.graph.nodes)
        self._by_name = {node.name: node for node in self._nodes}
        self._interpreter = torch.fx.Interpreter(graph, garbage_collect_values=False)
        self._names, self._groups = list(names), groups
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, symbol in enumerate(symbols):
            self._places[symbol].append(place)
        self._tolerance, self._alone = tolerance, alone
        self._looked: set[torch.fx.Node] = set()
        # What the program makes of nodes that are wrong, and that no kernel makes.
        self._own: dict[torch.fx.Node, Any] = {}
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
        # PyTorch goes on with what the arguments were.
        given = tuple(a.clone() if n in program.changes else a for n, a in enumerate(arguments))
        with program.watched(self._told):
            results = call(given)
        # The machine is not asked where there is one kernel.
        self._compare_results(results, 0 if program.direct and len(self._names) == 1 else None)
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
        if draws(node):  # another draw would be another number
            self._drawn(node, index, got)
            return
        expected = self._leaf(node, index)
        if isinstance(expected, torch.Tensor) and expected.layout is torch.strided:
            self.compared += 1
            laid = _laid(got, expected)
            expected = self._judge(place, node, index, laid, expected)
            if laid.shape == expected.shape and laid.dtype == expected.dtype:
                laid.copy_(expected)
        self._done(node)

    def _drawn(self, node: torch.fx.Node, index: int, got: torch.Tensor) -> None:
        """Go on with numbers that the program has drawn."""
        leaves, structure = pytree.tree_flatten(node.meta["val"])
        kept = _laid(got, leaves[index]).clone()
        if len(leaves) > 1:  # of the others PyTorch's are as good
            leaves = pytree.tree_leaves(self._value(node))
        leaves[index] = kept
        self._interpreter.env[node] = pytree.tree_unflatten(leaves, structure)
        self._done(node)

    def _leaf(self, node: torch.fx.Node, index: int) -> Any:
        leaves = pytree.tree_leaves(self._value(node))
        return leaves[index] if index < len(leaves) else None

    def _done(self, node: torch.fx.Node) -> None:
        self._waiting.discard(node.name)
        self._forget(node)
        give_back()  # what was freed lies between what is held

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
                    known = each in self._own
                    env[each] = self._own[each] if known else self._interpreter.run_node(each)
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

    def _compare_results(self, results: Sequence[Any], place: int | None) -> None:
        output = self._nodes[-1]
        nodes = pytree.tree_leaves(output.args[0])
        for node, got in zip(nodes, results, strict=True):
            if not isinstance(node, torch.fx.Node) or not isinstance(got, torch.Tensor):
                continue
            drawn = any(draws(n) for n in _ancestors(node))
            if self.failure is None and not drawn and got.layout is torch.strided:
                expected = self._value(node)
                if isinstance(expected, torch.Tensor):
                    self.compared += place is not None
                    self._judge(place, node, 0, got, expected)

    def _judge(
        self,
        place: int | None,
        node: torch.fx.Node,
        index: int,
        got: torch.Tensor,
        expected: torch.Tensor,
    ) -> torch.Tensor:
        """Note a difference; what PyTorch gives, of what the program makes of wrong nodes."""
        found = self._apart(place, node, index, got, expected)
        if found is None:
            return expected
        if self._blame(place, node):
            expected = self._leaf(node, index)
            found = self._apart(place, node, index, got, expected)
        if found is not None:
            self._note(found)
        return expected

    def _note(self, found: Difference) -> None:
        if len(self.differences) >= _KEPT:
            found.inputs = None
        self.differences.append(found)

    def _apart(
        self,
        place: int | None,
        node: torch.fx.Node,
        index: int,
        got: torch.Tensor,
        expected: torch.Tensor,
        alone: bool = False,
    ) -> Difference | None:
        error, reason = difference(got, expected)
        allowed = self._tolerance
        if allowed is None:
            allowed = TOLERANCE.get(expected.dtype, TOLERANCE[torch.float32])
        if error <= allowed:
            return None
        # What a kernel reads that no kernel was judged by may have been rounded otherwise, too.
        cone = [node] if alone else self._ordered(self._between(node))
        alike = got.shape == expected.shape and got.dtype == expected.dtype
        steps = any(map(_steps, cone))
        try:
            again = self._again(cone, node, index)
            if alike and is_rounding(got, expected, self._inputs(cone), again, steps):
                return None
        except Exception as failure:  # an operator that takes no inputs but these
            log.info("%s is not run again: %s: %s", node.name, type(failure).__name__, failure)
        own = self._closed([node.name, *([] if place is None else self._groups[place])])
        return Difference(place, node.name, error, reason, self._inputs(own))

    def _blame(self, place: int | None, node: torch.fx.Node) -> bool:
        """Whether a node before this one is wrong that no kernel was judged by; it is noted."""
        between = self._between(node)
        own = () if place is None else self._groups[place]
        found = False
        for each in self._nodes:
            if each in between and each.name not in own and each not in self._looked:
                self._looked.add(each)
                found |= self._differs(each)
        for each in between if found else ():
            self._interpreter.env.pop(each, None)
        return found or any(each in self._own for each in between)

    def _between(self, node: torch.fx.Node) -> set[torch.fx.Node]:
        """A node, and what it is made of since the results of kernels."""
        ends = {known[0] for known in self._names if known is not None}
        seen, stack = {node}, [node]
        while stack:
            for each in stack.pop().all_input_nodes:
                if each.op == "call_function" and each not in seen and each.name not in ends:
                    seen.add(each)
                    stack.append(each)
        return seen

    def _differs(self, node: torch.fx.Node) -> bool:
        if node.target is operator.getitem or draws(node):
            return False
        inputs = self._inputs([node])
        made = self._alone(node, inputs)
        if made is None:
            return False
        leaves = pytree.tree_leaves(self._value(node))
        for index, (got, expected) in enumerate(zip(pytree.tree_leaves(made), leaves, strict=True)):
            if isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
                found = self._apart(None, node, index, got, expected, alone=True)
                if found is not None:
                    self._note(found)
                    self._own[node] = made
                    return True
        return False

    def _closed(self, names: Sequence[str]) -> list[torch.fx.Node]:
        """Nodes, with those that take one result of theirs."""
        own = {self._by_name[name] for name in names}
        for node in self._nodes:
            if node.target is operator.getitem and node.args[0] in own:
                own.add(node)
        return self._ordered(own)

    def _ordered(self, own: set[torch.fx.Node]) -> list[torch.fx.Node]:
        return [node for node in self._nodes if node in own]

    def _inputs(self, own: Sequence[torch.fx.Node]) -> dict[str, Any]:
        """What nodes read that is not made by one of them."""
        read = dict.fromkeys(r for node in own for r in node.all_input_nodes if r not in own)
        values = {node.name: self._value(node) for node in read}
        return {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }

    def _again(self, own: Sequence[torch.fx.Node], node: torch.fx.Node, index: int) -> Run:
        """Runs nodes on other inputs, up to a result of one of them."""

        def run(inputs: Mapping[str, Any], wide: bool) -> torch.Tensor:
            env = {self._by_name[name]: value for name, value in inputs.items()}
            with torch.no_grad():
                for each in own:
                    args, kwargs = torch.fx.node.map_arg((each.args, each.kwargs), env.__getitem__)
                    if wide:
                        args, kwargs = pytree.tree_map(widened, (args, kwargs))
                    env[each] = self._interpreter.call_function(each.target, args, kwargs)
                    if each is node:
                        break
            made = pytree.tree_leaves(env[node])[index]
            assert isinstance(made, torch.Tensor)
            return made

        return run


def _steps(node: torch.fx.Node) -> bool:
    """Whether what a node gives may leap where its inputs hardly move."""
    values = pytree.tree_leaves(node.meta.get("val"))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    whole = any(not (v.is_floating_point() or v.is_complex()) for v in tensors)
    return whole or getattr(node.target, "overloadpacket", None) in _ROUNDED


def _laid(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """A kernel's tensor in the order of axes of the node's."""
    if not got.dim() == expected.dim() == 4:
        return got
    turned = got.permute(_LAST)
    if turned.shape != expected.shape:
        return got
    if got.shape != expected.shape:
        return turned
    # As many channels as rows and columns: the shape does not tell which order it is.
    if expected.dtype != got.dtype or isinstance(expected, FakeTensor):
        return got
    return turned if _distance(turned, expected) < _distance(got, expected) else got


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """How far two tensors are apart, taken together; NaN and infinity do not count."""
    apart = (got.float() - expected.float()).nan_to_num_(0.0, 0.0, 0.0)
    return float(apart.abs_().sum())


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    seen, stack = set(), [node]
    while stack:
        each = stack.pop()
        if each not in seen:
            seen.add(each)
            stack += each.all_input_nodes
    return seen
