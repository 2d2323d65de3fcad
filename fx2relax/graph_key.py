"""One digest of all that a compiled program depends on: two graphs with one key are one program."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.fx

from fx2relax import decompositions, devices, kept, registry, tvm_runtime
from fx2relax._version import __version__
from fx2relax.compat import cpu_features, tvm_ffi
from fx2relax.errors import target_name
from fx2relax.layouts import storage_of
from fx2relax.literals import NoSpelling, encode, operator_name
from fx2relax.params import InputSpec

Node = torch.fx.Node
#: The namespaces of operators that are PyTorch's or this package's.
OURS = frozenset(
    {"aten", "prims", "prim", "fx2relax", "_quantized", "quantized_decomposed", "rngprims"}
)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# What says which processor it is, of x86, ARM and RISC-V, and not how fast it runs just now.
_MODEL = frozenset(
    {
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
        *("isa", "uarch"),
    }
)
# What decides when a process compiles and where it stores programs, and nothing of what is in them.
_STORE = frozenset(
    {
        "FX2RELAX_BACKGROUND",
        "FX2RELAX_CACHE",
        "FX2RELAX_CACHE_DIR",
        "FX2RELAX_CACHE_SIZE",
        "FX2RELAX_COMPILE_PROCESS",
        "FX2RELAX_CUDA",
        "FX2RELAX_NEVER_SLOWER",
    }
)


def graph_key(
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    options: Any,
    helper: bool = False,
    tuned: str = "",
) -> str:
    """The digest of a graph and of everything else that decides what is compiled.

    Args:
        graph: a functional ATen graph; every node carries its fake value in ``meta["val"]``.
        specs: its inputs, see `importer.import_graph`.
        options: a frozen dataclass; its converters count by their targets alone, since what a
            user's converter made is never stored.
        helper: whether the process has the native helper, whose calls a program then makes.
        tuned: what decides which of the kernels' schedules were measured; empty where none was.

    Raises:
        NoSpelling: the graph holds what has no meaning outside of this process.
    """
    said = Spelled(graph)
    device = devices.facts(devices.of_graph(graph))
    text = json.dumps(
        {
            "graph": said.nodes(),
            "symbols": said.facts(),
            "inputs": [spelled_input(spec) for spec in specs],
            "options": {"library": options.library, "on_unsupported": options.on_unsupported},
            "converters": sorted(target_name(t) for t in registry.foreign()),
            "helper": helper,
            "process": process_facts(),
            **({"tuned": tuned} if tuned else {}),
            **({"device": device} if device else {}),
        },
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def is_symbolic(value: Any) -> bool:
    """Whether a fake value is a symbol, or a tensor that has one for a size or stride."""
    if isinstance(value, torch.Tensor):
        return bool(value._has_symbolic_sizes_strides)
    return isinstance(value, _SYMBOLIC)


def spelled_input(spec: InputSpec) -> list[Any]:
    """What is compiled for an input depends on this, and on its fake value."""
    fields = [spec.name, spec.kind, spec.mutated, spec.permutation, spec.position, spec.storage]
    return [*fields, spec.written]


class Spelled:
    """Spells one graph, its nodes by their places; `compiling.spelling` reads it again."""

    def __init__(self, graph: torch.fx.GraphModule, outer: Spelled | None = None) -> None:
        self.graph = graph
        self.places = {node: place for place, node in enumerate(graph.graph.nodes)}
        self.storages: dict[int, int] = {}
        self.symbols: dict[Any, None] = outer.symbols if outer is not None else {}
        self.envs: dict[int, Any] = outer.envs if outer is not None else {}
        self.nested = outer is not None

    def nodes(self) -> list[Any]:
        """Each node: its kind, what it calls, its arguments, its fake value."""
        return [self._node(node) for node in self.graph.graph.nodes]

    def _node(self, node: Node) -> list[Any]:
        if node.op == "get_attr":
            said: Any = self.attribute(attrgetter(str(node.target))(self.graph))
        elif node.op == "call_function":
            said = _target(node.target)
        else:
            said = None if node.op == "output" else str(node.target)
        return [node.op, said, self.arguments(node), self.value(node.meta.get("val"))]

    def arguments(self, node: Node) -> Any:
        """What a node takes: other nodes, sizes, and what is the same in every process."""
        return encode([list(node.args), dict(node.kwargs)], self._extra)

    def _extra(self, value: Any) -> Any:
        if isinstance(value, Node):
            return {"node": self.places[value]}
        return {"symbolic": self._number(value)} if isinstance(value, _SYMBOLIC) else None

    def _number(self, value: Any) -> Any:
        if not isinstance(value, _SYMBOLIC):
            return encode(value)
        node = value.node
        self.symbols.update(dict.fromkeys(node.expr.free_symbols))
        self.envs[id(node.shape_env)] = node.shape_env
        # The layout of what is compiled for any size is chosen by the one it was captured with.
        return [type(value).__name__, str(node.expr), str(node.hint)]

    def value(self, val: Any) -> Any:
        """What the importer can see of a fake value."""
        if not isinstance(val, torch.Tensor):
            if isinstance(val, (list, tuple)):
                return [self.value(v) for v in val]
            return self._number(val) if isinstance(val, _SYMBOLIC) else _plain(val)
        said: list[Any] = [type(val).__name__, str(val.dtype), str(val.layout), str(val.device)]
        said.append([self._number(n) for n in val.shape])
        said += [val.is_conj(), val.is_neg(), val.requires_grad, val.is_quantized]
        if val.layout is torch.strided:
            storage = storage_of(val)
            assert storage is not None
            place = self.storages.setdefault(storage, len(self.storages))
            said.append([self._number(n) for n in val.stride()])
            said += [self._number(val.storage_offset()), place]
            said.append(self._number(val.untyped_storage().nbytes()))
        return said

    def attribute(self, value: Any) -> Any:
        """A graph that the graph holds, or a constant."""
        if isinstance(value, torch.fx.GraphModule):
            return Spelled(value, self).nodes()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            # A constant of the graph itself is an argument of what is compiled.
            digest = _digest(value) if self.nested or value.numel() <= 1 << 16 else None
            return [str(value.dtype), list(value.shape), list(value.stride()), digest]
        raise NoSpelling(f"an attribute of type {type(value).__name__}")

    def facts(self) -> list[Any]:
        """What is known of the symbols that were met."""
        said: list[Any] = []
        for env in self.envs.values():
            said.append([str(guard.expr) for guard in env.guards])
            said.append(sorted(f"{k}={v}" for k, v in env.replacements.items()))
            ranges = env.var_to_range
            for symbol in sorted(self.symbols, key=str):
                known = sorted(symbol.assumptions0.items())
                said.append([str(symbol), str(ranges.get(symbol)), str(known)])
        return said


def _plain(val: Any) -> Any:
    try:
        return encode(val)
    except NoSpelling:
        return type(val).__name__  # an object that a call into PyTorch passes to another


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = operator_name(target)
        if target.namespace not in OURS and _taken_apart(target):
            raise NoSpelling(f"{name}, whose decomposition is not PyTorch's")
        return name
    if target is kept.kept_call:
        raise NoSpelling("a call that is kept whole")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", None)
    if module in ("_operator", "operator", "builtins", "math", "torch", "torch.fx.experimental"):
        return f"{module}.{target.__qualname__}"
    raise NoSpelling(f"a call of {target_name(target)}")


def _taken_apart(target: torch._ops.OpOverload) -> bool:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return decompositions.rule(target) is not None or target.has_kernel_for_dispatch_key(composite)


def _digest(value: torch.Tensor) -> str:
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.sha256(bytes(flat.view(torch.uint8).numpy())).hexdigest()


def process_facts() -> dict[str, Any]:
    """What programs of this process depend on, whatever their graphs."""
    switches = {k: v for k, v in os.environ.items() if k.startswith(("FX2RELAX_", "TVM_"))}
    return {
        **_fixed_facts(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "precision": torch.get_float32_matmul_precision(),
        "switches": sorted((k, v) for k, v in switches.items() if k not in _STORE),
    }


def versions() -> dict[str, str]:
    """The versions that a program was compiled by, for its users to read."""
    return {"fx2relax": __version__, "torch": torch.__version__, "tvm": tvm_runtime.version()}


@functools.cache
def _fixed_facts() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": [torch.__version__, torch.version.git_version],
        "tvm": [tvm_runtime.version(), tvm_ffi.__version__],
        "source": SOURCE,
        "cpu": _processor(),
        "kernels": torch.backends.cpu.get_cpu_capability(),  # which decide how weights are packed
    }


def _processor() -> list[str]:
    """What the processor is, which code is generated for."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return cpu_features()
    lines = (line.partition(":") for line in first.splitlines())
    return [f"{key.strip()}={value.strip()}" for key, _, value in lines if key.strip() in _MODEL]


def _source() -> str:
    """A digest of this package's files, as they are when it is imported."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    converters = Path(str(registry.__file__)).parent / "converters"
    if not converters.exists():  # an editable install keeps them beside the package
        converters = package.parent / "converters"
    for folder in (package, converters):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cpp", ".h") and path.is_file():
                digest.update(str(path.relative_to(folder)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCE = _source()
