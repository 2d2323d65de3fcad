"""The steps of a program as lines of Python, with PyTorch's tensors from end to end.

See `pipeline.straight` for the steps, and for what they are there for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fx2relax.calling import CONSTANTS, Calling
from fx2relax.dtypes import to_torch
from fx2relax.imported import Imported
from fx2relax.runtime import boundary, guarded, torch_call
from fx2relax.runtime.profiled import alone
from fx2relax.runtime.results import allocator, spelled, strides
from fx2relax.torch_calls import TorchCall

# Of ATen's operators, without overloads to choose from: what they return is memory of its own,
# whatever their operands are. PyTorch's Python functions of these names take half the time of
# `torch.ops`.
_FRESH = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "gather", "topk"),
    *("_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm"),
    *("amax", "amin", "argmax", "argmin", "cumsum", "cumprod", "index_copy", "index_select"),
    *("avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
)
_TURNED = (1, 0)


def _functions() -> dict[Any, Callable[..., Any]]:
    """The Python function of each of these operators, and of those of `runtime.guarded`."""
    found = {}
    for name in _FRESH:
        operator = getattr(getattr(torch.ops.aten, name, None), "default", None)
        for place in (torch._C._VariableFunctions, torch._C._nn):
            if operator is not None and hasattr(place, name):
                found[operator] = getattr(place, name)
    for name, function in guarded.FUNCTIONS.items():
        found[getattr(torch.ops.fx2relax, name).default] = function
    return found


_FUNCTIONS = _functions()
_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})


@dataclass(frozen=True)
class _Operand:
    """The text that stands for an operand among an operator's arguments."""

    text: str
    #: That of the matrix of which it is the transpose.
    turned: str = ""

    def permute(self, order: Sequence[int]) -> _Operand:
        turned = self.text if tuple(order) == _TURNED else ""
        return _Operand(f"{self.text}.permute({spelled(order)})", turned)


class Straight:
    """The steps of one program.

    Args:
        line: the steps, see `pipeline.straight`.
        kernels: gives a kernel by its symbol, or None.
        calls: the calls of PyTorch's, by their packed functions' names.
        constants: by the number in their names.
        kind: of the device that memory is on: the current one of its kind.
        shown: what the program calls, in order: the symbol, and what a profiler shows for it.

    Attributes:
        values: what the lines name.
        profiled: what takes the place of some of them while a profiler runs.
        watched: whether the virtual machine is to make a call, for those who watch it.

    Raises:
        LookupError: a kernel is not there.
    """

    def __init__(
        self,
        line: Sequence[Any],
        kernels: Callable[[str], Any],
        calls: Mapping[str, TorchCall],
        constants: Sequence[torch.Tensor],
        kind: str,
        shown: Sequence[tuple[str, str]],
    ) -> None:
        (_, count), *steps = line
        #: How much the function takes.
        self.count = int(count)
        self._line, self._calls = steps, calls
        self.values: dict[str, Any] = {"empty": allocator(kind)}
        self.values |= {f"c{i}": constant for i, constant in enumerate(constants)}
        self.profiled: dict[str, Any] = {}
        self.watched = False
        # Of what a call has returned, the orders of axes that are wanted.
        self._orders: dict[str, Sequence[Any]] = {}
        titles: dict[str, list[str]] = {}
        for symbol, title in shown:
            titles.setdefault(symbol, []).append(title)
        found: dict[str, Any] = {}
        for place, (step, symbol, *_) in enumerate(steps):
            if step != "kernel":
                continue
            kernel = found.get(symbol) or kernels(symbol)
            if kernel is None:
                raise LookupError(f"the program has no kernel {symbol}")
            found[symbol] = self.values[f"k{place}"] = kernel
            title = titles[symbol].pop(0) if titles.get(symbol) else symbol
            self.profiled[f"k{place}"] = alone(kernel, [(symbol, title)])

    @property
    def condition(self) -> str:
        """When the virtual machine makes a call: kernels check strides that it alone gives."""
        sized = [step for step in self._line if step[0] in ("empty", "view")]
        texts = {size: None for _, _, *what in sized for size in _symbolic(what)}
        return " or ".join(["straight.watched", *(f"not {size}" for size in texts)])

    def lines(self, taken: Sequence[str]) -> list[str]:
        """The steps, which leave what the function returns in ``returned``.

        Args:
            taken: the texts of what the function takes.
        """
        last = _last_uses(self._line)
        written: list[str] = []
        for place, step in enumerate(self._line):
            written += self._written(place, step, taken)
            gone = [name for name, end in last.items() if end == place]
            if gone:  # the next step may have the memory
                written.append(f"del {', '.join(gone)}")
        return written

    def _written(self, place: int, step: Any, taken: Sequence[str]) -> Iterator[str]:
        def text(operand: Any) -> str:
            return operand if isinstance(operand, str) else taken[operand]

        kind, *what = step
        if kind == "empty":
            name, sizes, dtype = what
            self.values[dtype] = to_torch(dtype)
            yield f"{name} = empty({spelled(sizes)}, {spelled(strides(sizes))}, {dtype})"
        elif kind == "view":
            name, source, sizes = what
            yield f"{name} = {text(source)}.view({spelled(sizes)})"
        elif kind == "item":
            name, source, index = what
            yield f"{name} = {text(source)}[{index}]"
            if source in self._orders:
                yield from _tidied(name, self._orders[source][index])
        elif kind == "kernel":
            yield f"k{place}({', '.join(map(text, what[1]))})"
        elif kind == "torch":
            name, symbol, operands, single = what
            yield from self._called(place, name, self._calls[symbol], list(map(text, operands)))
            if single and name in self._orders:
                yield from _tidied(name, self._orders[name][0])
        else:
            yield f"returned = [{', '.join(map(text, what[0]))}]"

    def _called(self, place: int, name: str, call: TorchCall, operands: list[str]) -> Iterator[str]:
        """A call of PyTorch's, with its other arguments where they stand."""
        operands = operands[: len(operands) - call.extra_operands]
        known = _FUNCTIONS.get(call.target)
        function = f"f{place}"
        plain = call.is_plain and isinstance(call.target, torch._ops.OpOverload)
        if not plain or (known is None and any(call.orders)):
            self.values[function] = torch_call.plain(call)
            yield f"{name} = {function}({', '.join(operands)})"
            return
        args, kwargs = call.arguments([_Operand(o) for o in operands])
        last = args[-1] if args else None
        if call.target in _PRODUCTS and not kwargs and isinstance(last, _Operand) and last.turned:
            # It transposes in C++.
            self.values["linear"] = torch._C._nn.linear
            *bias, left, _ = (self._argument(function, a) for a in args)
            yield f"{name} = linear({', '.join([left, last.turned, *bias])})"
        else:
            self.values[function] = known or call.target
            given = [self._argument(f"a{place}", a) for a in args]
            given += [f"{key}={self._argument(f'a{place}', a)}" for key, a in kwargs.items()]
            yield f"{name} = {function}({', '.join(given)})"
        if known is None:
            self.values["apart"] = torch_call.apart
            yield f"{name} = apart({name}, ({', '.join([*operands, ''])}))"
        else:
            self._orders[name] = call.orders

    def _argument(self, stem: str, value: Any) -> str:
        if isinstance(value, _Operand):
            return value.text
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._argument(stem, v) for v in value)
            return f"[{inner}]"
        if isinstance(value, (bool, int, str, type(None))):
            return repr(value)
        name = f"{stem}_{sum(key.startswith(stem + '_') for key in self.values)}"
        self.values[name] = value
        return name


def straight(
    machine: Any,
    kernel: Callable[[str], Any],
    imported: Imported,
    calling: Calling,
    device: torch.device,
    shown: Sequence[tuple[str, str]],
) -> Straight | None:
    """The steps of a program; None where each call needs the virtual machine.

    Args:
        machine: one of the program's, see `tvm_runtime.Machine`.
        kernel: gives a kernel by its symbol, or None.
        imported: what the program was compiled from.
        calling: how it is called.
        device: where its tensors are.
        shown: see `Straight`.
    """
    if not calling.line:
        return None
    name = imported.name + CONSTANTS
    known = machine.module.implements_function(name)
    constants = list(map(boundary.result, machine[name]())) if known else []
    try:
        calls = imported.torch_calls
        return Straight(calling.line, kernel, calls, constants, device.type, shown)
    except LookupError:
        return None


def _tidied(name: str, order: Any) -> Iterator[str]:
    """A tensor of PyTorch's with its axes in the order wanted, and without gaps."""
    if order is not None:
        yield f"{name} = {name}.permute({spelled(order)})"
    yield f"if not {name}.is_contiguous(): {name} = {name}.contiguous()"


def _symbolic(what: Sequence[Any]) -> list[str]:
    """The sizes of a step that are texts."""
    sizes = next(v for v in what if isinstance(v, (tuple, list)))
    return [size for size in sizes if isinstance(size, str)]


def _last_uses(line: Sequence[Any]) -> dict[str, int]:
    """The step after which a name that a step gave is not read any more."""
    last: dict[str, int] = {}
    for place, (kind, *what) in enumerate(line):
        if kind not in ("kernel", "return"):
            last[what[0]] = place
        for value in pytree.tree_leaves(what[1:] if kind == "kernel" else what):
            if value in last:
                last[value] = place
    return last
