"""The way of a call, written out as Python for one program.

Two functions of a tuple of arguments are made of the same lines. `checked` takes any arguments and
prepares them one by one. `direct` takes arguments that lie as the program needs them, which one
check in C++ tells, and hands them over as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fx2relax.calling import Calling
from fx2relax.compat import tvm_ffi
from fx2relax.errors import ArgumentError
from fx2relax.outputs import OutputSpec
from fx2relax.params import InputSpec
from fx2relax.runtime import boundary
from fx2relax.runtime.profiled import PROFILER
from fx2relax.runtime.results import results

_SHAPES: dict[int, Any] = {}
_ADOPTED = 8


class Way:
    """How one program is called.

    Args:
        calling: what its function takes and returns.
        inputs: the parameters left of the weights.
        outputs: the graph's.
        values: what the lines name: ``machines``, whose ``own`` is this thread's
            `program.Entry`; ``FORK``, for which that waits; ``kernel``, its one kernel, or None;
            ``straight``, its `straight.Straight`, or None; ``expect``, which looks at arguments
            then; ``solve``, which makes the parameter of solved symbols of the arguments, or None;
            ``weights``, which makes the list of what stands right of the inputs of them, or None;
            ``weight_count``; ``fail``, which makes the exception of the arguments and an error;
            ``own``, which copies results that share memory.
        profiled: what takes the place of some of `values` while a profiler runs.
        kind: of the device that results are on.
    """

    def __init__(
        self,
        calling: Calling,
        inputs: Sequence[InputSpec],
        outputs: Sequence[OutputSpec],
        values: dict[str, Any],
        profiled: dict[str, Any],
        kind: str = "cpu",
    ) -> None:
        self._inputs = list(inputs)
        self._aligned = boundary.ALIGNED.get(kind)
        self._guarded = [s for s in self._inputs if isinstance(s.val, torch.Tensor)]
        self._calling = calling
        self._solved = values["solve"] is not None
        self._implied = {param: (other, axis) for param, other, axis in calling.implied}
        self._results = results(calling, outputs, kind)
        self._weights = values["weights"] is not None
        self._kernel = values["kernel"] is not None
        self._straight = values["straight"]
        self._names = {
            **self._results.values,
            **values,
            "argument": functools.partial(boundary.argument, kind=kind),
            "shape_of": _shape_of,
            "as_real": torch.view_as_real,
            "another_size": _another_size,
            "guards": _Guards(self._guarded, self._simple()),
        }
        for i, spec in enumerate(self._inputs):
            self._names[f"input{i}"] = spec
        # Nothing that they see leads back to them, so that a program that is dropped is gone.
        lines = [*self._checked(), *self._direct()]
        if self._straight is not None:
            self._names |= self._straight.values
            profiled = {**profiled, **self._straight.profiled}
        names = {**self._names, **profiled}
        self._names |= {"PROFILER": PROFILER, "profiled": _Written(self._checked(), names)}
        exec(compile("\n".join(lines), "<fx2relax program>", "exec"), self._names)
        # Taken out of what they see, so that they are freed as soon as nothing else holds them.
        self.checked: Callable[[Sequence[Any]], list[Any]] = self._names.pop("checked")
        self.direct: Callable[[Sequence[Any]], list[Any]] = self._names.pop("direct")

    def _simple(self) -> bool:
        """Whether all tensors may be handed over without a look at each."""
        return not any(
            spec.storage is not None or spec.at_start or spec.val.layout is not torch.strided
            for spec in self._guarded
        )

    def _checked(self) -> list[str]:
        lines = ["def checked(a):", "    try:"]
        for i, spec in enumerate(self._inputs):
            lines.append(f"        v{i} = argument(input{i}, a[{spec.position}])")
        if self._straight is not None:
            lines.append("        expect(a)")
        lines += self._call()
        # What has gone well once can go the short way the next time.
        tensors = ", ".join(f"a[{spec.position}]" for spec in self._guarded)
        return [*lines, f"    guards.adopt({tensors})", *self._finish()]

    def _direct(self) -> list[str]:
        tensors = [f"a[{spec.position}]" for spec in self._guarded]
        lines = [
            "def direct(a, checked=checked):",
            "    if PROFILER._is_profiler_enabled: return profiled(a)",
            "    try:",
            f"        if not guards.check({', '.join(tensors)}): return checked(a)",
            "    except IndexError: return checked(a)",
        ]
        for i, spec in enumerate(self._inputs):
            if isinstance(spec.val, torch.Tensor):
                value = f"a[{spec.position}]"
                if spec.permutation is not None:
                    value = f"{value}.permute({tuple(spec.permutation)})"
                if spec.val.is_complex():
                    value = f"as_real({value})"
                lines.append(f"    v{i} = {value}")
                if self._aligned:  # which guards do not look at
                    lines.append(f"    if v{i}.data_ptr() % {self._aligned}: return checked(a)")
                if not _static(spec.val):
                    lines.append(f"    if not (v{i}.is_contiguous() and v{i}.numel()):")
                    lines.append("        return checked(a)")
        lines.append("    try:")
        for i, spec in enumerate(self._inputs):
            if isinstance(spec.val, torch.SymInt) and i not in self._implied:
                lines.append(f"        v{i} = shape_of(a[{spec.position}])")
            elif not isinstance(spec.val, (torch.Tensor, torch.SymInt)):
                lines.append(f"        v{i} = argument(input{i}, a[{spec.position}])")
        return [*lines, *self._call(), *self._finish()]

    def _call(self) -> list[str]:
        """The lines from prepared inputs to what the program returns."""
        count = len(self._inputs)
        lines = [f"v{count} = solve(a)"] if self._solved else []
        for param, (other, axis) in self._implied.items():
            spec = self._inputs[param]
            unequal = f"a[{spec.position}] != v{other}.shape[{axis}]"
            lines.append(f"if {unequal}: raise another_size({spec.name!r})")
        for name, param, axis in self._calling.symbols:
            lines.append(f"{name} = {self._size(param, axis)}")
        lines += self._results.before
        taken = [f"v{i}" for i in range(count + self._solved) if i not in self._implied]
        if self._weights:
            lines.append("w = weights(a)")
        if self._kernel and self._calling.kernel is not None:
            arguments = self._places(taken)
            given = [arguments[place] for place in self._calling.kernel[1]]
            lines.append(f"kernel({', '.join(given)})")
        elif self._straight is not None:
            lines += [f"if {self._straight.condition}:", *_inside(self._by_machine(taken)), "else:"]
            lines += _inside(self._straight.lines(self._places(taken)))
        else:
            lines += self._by_machine(taken)
        return [
            *(f"        {line}" for line in lines),
            "    except Exception as error:",
            "        raise fail(a, error) from None",
        ]

    def _by_machine(self, taken: list[str]) -> list[str]:
        """The lines of a call of the virtual machine."""
        passed = [*taken, *(["*w"] if self._weights else []), *self._results.memory]
        lines = ["entry = machines.own", "entry.inside += 1", "try:"]
        lines.append("    if FORK.closed: FORK.wait(entry)")
        lines.append(f"    returned = entry.main({', '.join(passed)})")
        if self._calling.results - len(self._calling.given) - len(self._calling.known):
            lines.append("    entry.release()")
        return [*lines, "finally: entry.inside -= 1"]

    def _places(self, taken: list[str]) -> list[str]:
        """What the function takes, in order."""
        count, memory = self._names["weight_count"], self._results.memory
        if self._straight is not None:  # of weights it may have made another number of tensors
            count = self._straight.count - len(taken) - len(memory)
        return [*taken, *(f"w[{i}]" for i in range(count)), *memory]

    def _size(self, param: int, axis: int) -> str:
        if param == len(self._inputs):
            return f"v{param}[{axis}]"
        spec = self._inputs[param]
        if isinstance(spec.val, torch.Tensor):
            return f"v{param}.shape[{axis}]"
        return f"a[{spec.position}]"

    def _finish(self) -> list[str]:
        lines = [*self._results.after, f"return [{', '.join(self._results.outputs)}]"]
        return [f"    {line}" for line in lines]


def _inside(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


class _Written:
    """A function of the name `checked`, written out when it is first called.

    Args:
        lines: the function's.
        names: what they name.
    """

    def __init__(self, lines: list[str], names: dict[str, Any]) -> None:
        self._lines, self._names = lines, names
        self._run: Callable[[Sequence[Any]], list[Any]] | None = None

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        run = self._run
        if run is None:
            own = dict(self._names)
            exec(compile("\n".join(self._lines), "<fx2relax program>", "exec"), own)
            run = self._run = own.pop("checked")
        return run(arguments)


class _Guards:
    """Tells arguments that may be handed over as they are.

    Args:
        specs: the inputs that are tensors.
        some: whether there may be such arguments.
    """

    def __init__(self, specs: Sequence[InputSpec], some: bool) -> None:
        self._specs = list(specs)
        self._left = _ADOPTED if some else 0
        self.check: Callable[..., bool] = self._first

    def _first(self, *tensors: Any) -> bool:
        self.check = _refuse
        self.adopt(*tensors)
        return self.check(*tensors)

    def adopt(self, *tensors: Any) -> None:
        """Let tensors like these through, if they lie as the program needs them."""
        if not self._left:
            return
        self._left -= 1
        if all(map(_lies_well, self._specs, tensors)):
            self.check = _guard(self._specs, tensors)


def _lies_well(spec: InputSpec, tensor: Any) -> bool:
    """Whether a tensor is what the program takes, of whatever dtype and sizes."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.dim() != spec.val.dim():
        return False
    if spec.val.is_cuda and tensor.device != spec.val.device:
        return False
    physical = tensor if spec.permutation is None else tensor.permute(spec.permutation)
    if not physical.is_contiguous() or tensor.numel() == 0:
        return False
    return boundary.begins_well(tensor)


def _guard(specs: Sequence[InputSpec], tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether tensors are of the same kind, dtype, device, sizes and strides as these."""
    if not tensors:
        return lambda: True
    static = [_static(spec.val) for spec in specs]
    sizes: list[Any] = [
        [size if fixed else None for size in tensor.shape]
        for fixed, tensor in zip(static, tensors, strict=True)
    ]
    strides: list[Any] = [
        [stride if fixed else None for stride in tensor.stride()]
        for fixed, tensor in zip(static, tensors, strict=True)
    ]
    guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    try:
        made = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except TypeError:  # it is no public name, and may be gone
        return _refuse
    check: Callable[..., bool] = made.check
    return check


def _static(val: Any) -> bool:
    sizes: tuple[Any, ...] = (*val.shape, *val.stride())
    return all(isinstance(size, int) for size in sizes)


def _another_size(name: str) -> ArgumentError:
    return ArgumentError(f"argument {name!r} is not the size that a tensor shows")


def _refuse(*tensors: Any) -> bool:
    return False


def _shape_of(size: Any) -> Any:
    """An int as the program takes it; the same object for the same int."""
    found = _SHAPES.get(size)
    if found is None or type(size) is not int:
        if len(_SHAPES) > 4096:
            _SHAPES.clear()
        found = _SHAPES[size] = tvm_ffi.Shape((int(size),))
    return found
