"""A built Relax module as a Python callable: arguments in, run, outputs out."""

from __future__ import annotations

import functools
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import tvm_ffi

from fx2relax import stages, tvm_runtime
from fx2relax.calling import Calling
from fx2relax.errors import ArgumentError, KernelFailure
from fx2relax.imported import Imported
from fx2relax.objects import operators
from fx2relax.outputs import OutputSpec
from fx2relax.params import InputSpec
from fx2relax.runtime import boundary, torch_call
from fx2relax.runtime.direct import Way
from fx2relax.runtime.forks import FORK, Inside
from fx2relax.runtime.heap import give_back, keep_for, keep_freed
from fx2relax.runtime.profiled import Profiled, alone
from fx2relax.runtime.results import heap_bytes
from fx2relax.runtime.sizes import Solver
from fx2relax.runtime.stand_ins import StandIns
from fx2relax.runtime.straight import straight
from fx2relax.runtime.weights import Weights

# Weights of fewer bytes leave nothing behind that is worth a walk over the heap.
_LARGE = 8 << 20


class Program:
    """One compiled graph.

    Calling it takes the graph's flat placeholders in order and returns its flat outputs. It may be
    called from several threads at once.

    Args:
        imported: what the executable was compiled from.
        executable: a loaded library, or what `relax.build` gives.
        device: where the tensors are; the CPU when left out.
        calling: how the function is called; it takes and returns what `imported` says when left
            out.
        kernels: what the function calls, in order: the symbol, and what a profiler shows for it.
        trains: whether it is called in each step of training, which frees what the last one made.

    Raises:
        ArgumentError: (a ValueError) an argument of the wrong shape, dtype, device or kind; the
            message names it.
    """

    def __init__(
        self,
        imported: Imported,
        executable: Any,
        device: torch.device | None = None,
        calling: Calling | None = None,
        kernels: Sequence[tuple[str, str]] = (),
        trains: bool = False,
    ) -> None:
        self.imported = imported
        self.device = device or torch.device("cpu")
        gpu = None if self.device.type == "cpu" else _gpu(self.device)
        if gpu is None:
            keep_freed()
        torch_call.register(imported.torch_calls)
        where = tvm_runtime.device(f"{self.device.type}:{self.device.index or 0}")
        # A pool keeps memory of each size: where sizes vary, those that do not come again are lost.
        pooled = not any(map(_varies, imported.params))
        machines = _Machines(executable, where, imported.name, pooled)
        transform = f"{imported.name}_transform_params"
        lifted = machines.own.machine.module.implements_function(transform)
        calling = calling or Calling(_count(imported.outputs))
        frozen, size = imported.weights, imported.weight_bytes
        #: How many bytes of weights it makes something else of, which it holds from then on.
        self.made_of = size if lifted else 0
        lift = _Transform(executable, where, transform, size) if lifted else None
        machine = machines.own.machine
        found = functools.partial(_kernel, machine.module)
        self._straight = straight(machine, found, imported, calling, self.device, kernels)
        streams = None if gpu is None else gpu.streams
        weights = Weights(frozen, lift, streams, self._straight is not None)
        parts = _Parts(imported, self.device, weights)
        weakref.finalize(parts, torch_call.unregister, list(imported.torch_calls))
        if gpu is None:
            size = heap_bytes(calling)
            keep_for(parts, call=calling.allocated + size, step=size if trains else 0)
        solver = Solver(imported.solved, imported.params) if imported.solved else None
        kernel = None
        if calling.kernel is not None and not lifted:
            kernel = _kernel(machines.own.machine.module, calling.kernel[0])
        values = {
            "FORK": FORK,
            "machines": machines,
            "kernel": kernel,
            "straight": self._straight,
            "expect": parts.expect,
            "solve": solver.solve if solver is not None else None,
            "weights": parts.ready if frozen else None,
            "weight_count": len(frozen),
            "fail": parts.failed,
            "own": parts.own,
        }
        profiled = {
            "machines": Profiled(machines.another, kernels),
            "kernel": alone(kernel, kernels) if kernel is not None else None,
        }
        self._machines, self._parts = machines, parts
        self._kinds = calling.weights
        #: The arguments that a call changes where they lie, by their positions.
        self.changes = {
            imported.params[given.into].position
            for given in calling.given
            if given.into is not None
        }
        #: Whether a call goes past the virtual machine, to the one kernel.
        self.direct = kernel is not None
        inputs = imported.params[: imported.num_input]
        way = Way(calling, inputs, imported.outputs, values, profiled, self.device.type)
        #: The same as a call, of a tuple of arguments; it does without the program.
        self.call: Callable[[Sequence[Any]], list[Any]] = way.direct
        if gpu is not None:
            self.call = gpu.entered(way.direct, self._straight is not None)

    def __call__(self, *arguments: Any) -> list[Any]:
        return self.call(arguments)

    @contextmanager
    def watched(self, instrument: Callable[..., int]) -> Iterator[None]:
        """Tell a function of every call that the virtual machine of this thread makes.

        Args:
            instrument: see `relax.VirtualMachine.set_instrument`.
        """
        machine = self._machines.own.machine
        machine["set_instrument"](instrument)
        if self._straight is not None:
            self._straight.watched = True
        try:
            yield
        finally:
            if self._straight is not None:
                self._straight.watched = False
            self._machines.renew()  # there is no way to take one back

    @property
    def can_stand_in(self) -> bool:
        """Whether there is something that `standing_in` can put in the place of weights."""
        return bool(self._kinds)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Make nothing of weights: calls take as long, and what they return has no meaning."""
        with self._parts.standing_in(StandIns(self._kinds)):
            yield

    def forget(self) -> None:
        """Let go of what was made of weights, and of memory for values: the next call makes it."""
        self._parts.forget()
        give_back()


class _Parts:
    """What a call needs besides its lines, and nothing that holds these: a program that is dropped
    is freed at once, with the weights that it made.
    """

    def __init__(self, imported: Imported, device: torch.device, weights: Weights) -> None:
        self.imported = imported
        self.device = device
        self._weights: Weights | StandIns = weights
        self._made = weights
        self._own = operators(imported.mod) if imported.mod is not None else []
        frozen = imported.weights
        self._constants: dict[int, Any] = {
            i: s.value.to(device)
            for i, s in enumerate(frozen)
            if s.position < 0 and s.value is not None
        }
        self._frozen = [s.position for s in frozen]
        self._shared: list[int] | None = None

    def ready(self, arguments: Sequence[Any]) -> list[Any]:
        """The weights as the function takes them."""
        return self._weights.get(
            [
                self._constants[i] if position < 0 else arguments[position]
                for i, position in enumerate(self._frozen)
            ]
        )

    @contextmanager
    def standing_in(self, tensors: StandIns) -> Iterator[None]:
        """Take these for the weights."""
        self._weights = tensors
        try:
            yield
        finally:
            self._weights = self._made

    def expect(self, arguments: Sequence[Any]) -> None:
        """Look at arguments that no virtual machine will.

        Raises:
            ArgumentError: one is not as the program takes it.
        """
        for spec in self.imported.params:
            if spec.position >= 0:
                self._look(spec, arguments)

    def forget(self) -> None:
        """Let go of what was made of the weights."""
        self._made.forget()

    def own(
        self, results: list[Any], arguments: Sequence[Any], changed: Sequence[int] = ()
    ) -> None:
        """Copy the results that share memory with an argument or an earlier result.

        Those that lie in an argument that the program changes stay there.
        """
        found = self._shared if self._shared is not None else _sharing(results, arguments)
        shared = [index for index in found if index not in changed]
        if all(not isinstance(r, torch.Tensor) or r.numel() for r in results):
            self._shared = shared  # an empty result has no memory to compare
        for index in shared:
            results[index] = results[index].clone()

    def failed(self, arguments: Sequence[Any], error: Exception) -> Exception:
        """What a failed call raises."""
        try:
            self._explain(arguments, error)
        except ArgumentError as explained:
            self._raised()
            return explained
        raised = self._raised()
        if raised is None and self._own and _by_a_kernel(error):
            raise KernelFailure.of(self._own, error) from error
        return raised or error

    def _raised(self) -> Exception | None:
        """What an operator that runs in PyTorch raised, forgotten at once."""
        raised = None
        for call in self.imported.torch_calls.values():
            raised = call.take_error() or raised
        return raised

    def _explain(self, arguments: Sequence[Any], error: Exception) -> None:
        """Turn a failed call into an ArgumentError if an argument is to blame."""
        try:
            self.expect(arguments)
        except ArgumentError as explained:
            raise explained from error

    def _look(self, spec: InputSpec, arguments: Sequence[Any]) -> None:
        if spec.position >= len(arguments):
            raise ArgumentError(f"argument {spec.name!r} is missing")
        reason = boundary.mismatch(spec, arguments[spec.position], self.device)
        if reason is not None:
            raise ArgumentError(f"argument {spec.name!r}: {reason}")


def _gpu(device: torch.device) -> Any:
    """What calls on a GPU need besides; imported for these alone."""
    from fx2relax.runtime.cuda import Gpu

    return Gpu(device)


def _varies(spec: InputSpec) -> bool:
    """Whether an argument is, or has, a size that is a symbol."""
    sizes = spec.val.shape if isinstance(spec.val, torch.Tensor) else [spec.val]
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _by_a_kernel(error: Exception) -> bool:
    """Whether an error came out of a function of an object, and not of a kernel's own assertion.

    C++ leaves a frame of its own file; what it throws without one is an InternalError, and what it
    is not made for a TypeError.
    """
    if isinstance(error, TypeError) or tvm_runtime.has_kind(error, "InternalError"):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    file = frames[-1][0].f_code.co_filename if frames else ""
    return file.endswith(" source>") or not file.endswith((".py", ".pxi", ">"))


def _sharing(results: Sequence[Any], arguments: Sequence[Any]) -> list[int]:
    """Which results share memory with an argument or an earlier result.

    TVM makes a reshape a view. Where it is the last step to an output, eager's output would be
    memory of its own. A program's memory plan is the same at every call, so one look is enough.
    """
    seen = {
        value.untyped_storage().data_ptr()
        for value in arguments
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    }
    found = []
    for index, value in enumerate(results):
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            continue
        address = value.untyped_storage().data_ptr()
        if address in seen:
            found.append(index)
        seen.add(address)
    return found


class _Machines(threading.local):
    """The virtual machine of each thread: one must not be entered by two at once."""

    def __init__(self, executable: Any, where: Any, name: str, pooled: bool = True) -> None:
        module = executable if isinstance(executable, tvm_ffi.Module) else executable.jit()
        self._made_of = module, where, name, pooled
        self.renew()

    def renew(self) -> None:
        """Put another machine in the place of this thread's."""
        self.own = self.another()

    def another(self) -> Entry:
        """A virtual machine besides this thread's."""
        return Entry(*self._made_of)


class Entry(Inside):
    """The way into one thread's virtual machine.

    Args:
        module: see `tvm_runtime.Machine`, as for the next.
        where: the same.
        name: of the function.
        pooled: see `tvm_runtime.Machine`.
    """

    def __init__(self, module: Any, where: Any, name: str, pooled: bool) -> None:
        super().__init__()
        with self.entered():
            self.machine = tvm_runtime.Machine(module, where, pooled=pooled)
        self.main: Callable[..., Any] = self.machine[name]
        self.release = self.machine.release


class _Transform:
    """Makes what a program takes of its weights.

    In machines of its own, without the pool that others share and that never gives memory back.

    Args:
        executable: for TVM's virtual machine.
        where: TVM's device.
        name: of the transform.
        size: of all weights, in bytes.
    """

    def __init__(self, executable: Any, where: Any, name: str, size: int) -> None:
        self._machines = _Machines(executable, where, name, pooled=False)
        self._large = size >= _LARGE

    def __call__(self, weights: Any) -> Any:
        own = self._machines.own
        with stages.recorded("prepare weights"), own.entered():
            made = own.main(weights)
            own.release()
        if self._large:
            give_back()
        return made


def _kernel(module: Any, name: str) -> Any | None:
    """A kernel of a program's library, to be called past the virtual machine."""
    for library in module.imports:
        if "VM" not in library.kind and library.implements_function(name):
            return library.get_function(name)
        found = _kernel(library, name)
        if found is not None:
            return found
    return None


def _count(outputs: Sequence[OutputSpec]) -> int:
    """How many results the outputs of a graph are made of."""
    named = [0]
    for spec in outputs:
        places = [spec.expanded, spec.strides, spec.exact, spec.numbers, *(spec.view or ())]
        if spec.kind not in ("input", "input_view", "value"):
            places.append(spec.index)
        named += [place + 1 for place in places if isinstance(place, int)]
    return max(named)
