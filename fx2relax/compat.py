"""Every TVM name whose place or signature has moved between releases; nothing else names them.

The rest of the package imports TVM through this module, so that a new TVM is one file's work. TVM
itself is imported when one of the names is first used.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import tvm_ffi

from fx2relax.late import Late

if TYPE_CHECKING:
    import tvm
    from tvm import relax, te, tirx, topi
    from tvm.ir import Expr, IRModule, Range, is_prim_expr
    from tvm.relax import AnyType, BlockBuilder, ShapeType, TensorType, TupleType, Var, op
    from tvm.relax.expr_functor import PyExprMutator, mutator
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T
    from tvm.sym import Analyzer
else:
    tvm = Late("tvm")
    relax, te, tirx, topi = (Late(f"tvm.{name}") for name in ("relax", "te", "tirx", "topi"))
    op, Var, BlockBuilder, AnyType, ShapeType, TensorType, TupleType = (
        Late("tvm.relax", name)
        for name in (
            *("op", "Var", "BlockBuilder", "AnyType", "ShapeType", "TensorType", "TupleType"),
        )
    )
    Expr, IRModule, Range, is_prim_expr = (
        Late("tvm.ir", name) for name in ("Expr", "IRModule", "Range", "is_prim_expr")
    )
    PyExprMutator = Late("tvm.relax.expr_functor", "PyExprMutator")
    mutator = Late("tvm.relax.expr_functor", "mutator")
    IRBuilder = Late("tvm.script.ir_builder", "IRBuilder")
    T = Late("tvm.script.ir_builder.tirx")
    Analyzer = Late("tvm.sym", "Analyzer")

TVMTensor = tvm_ffi.Tensor  # TVM's own is a subclass

__all__ = [
    "Analyzer",
    "AnyType",
    "BlockBuilder",
    "Expr",
    "IRBuilder",
    "IRModule",
    "PyExprMutator",
    "Range",
    "ShapeType",
    "T",
    "TVMTensor",
    "TensorType",
    "TupleType",
    "Var",
    "const_int",
    "const_number",
    "cpu_features",
    "dtype_of",
    "from_onnx",
    "from_torch",
    "is_prim_expr",
    "is_shape",
    "is_tensor",
    "is_tuple",
    "mutator",
    "op",
    "register_global_func",
    "relax",
    "remove_global_func",
    "rpc",
    "shape_expr",
    "shape_values",
    "te",
    "threads_apart",
    "tirx",
    "topi",
    "tvm",
    "tvm_ffi",
]


# What interrupts a Python function that TVM has called comes out of TVM as what it is; other kinds
# than those that are known become a RuntimeError, which is taken for a failed compilation.
tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)
tvm_ffi.register_error("SystemExit", SystemExit)


class _Stack(threading.local):
    """A list for each thread."""

    def __init__(self) -> None:
        self._items: list[Any] = []

    def append(self, item: Any) -> None:
        self._items.append(item)

    def pop(self) -> Any:
        return self._items.pop()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class _Tags(threading.local):
    """The tag that a thread's operators are being given; in place of `TagScope`'s own methods."""

    scope: Any = None

    def get_current(self) -> Any:
        if self.scope is not None:
            self.scope.accessed = True
        return self.scope

    def enter(self, scope: Any) -> Any:
        if self.scope is not None:
            raise ValueError("nested op_tag is not allowed for now")
        self.scope = scope
        return scope

    def leave(self, *_: Any) -> None:
        self.scope = None


@functools.cache
def threads_apart() -> None:
    """Give each thread builders of functions and a tag of operators of its own; done once.

    TVM has one list of the builders that functions are being made with, and one tag of the
    operators that are being made, for all threads: two that import at once would take each other's
    for their own.
    """
    # What is late itself cannot be changed.
    builder = Late("tvm.relax", "BlockBuilder").found()
    if isinstance(getattr(builder, "_stack", None), list):
        builder._stack = _Stack()
    scopes = Late("tvm.te.tag", "TagScope").found()
    if "_current" in vars(scopes):
        tags = _Tags()
        scopes.get_current = staticmethod(tags.get_current)
        scopes.__enter__ = lambda scope: tags.enter(scope)
        scopes.__exit__ = lambda scope, *error: tags.leave(*error)
        del scopes._current


def type_of(expr: Any) -> Any:
    """A Relax expression's type (`struct_info` before TVM 0.26)."""
    return expr.ty


def is_tensor(expr: Any) -> bool:
    """Whether a Relax expression is a tensor."""
    return isinstance(type_of(expr), TensorType)


def is_tuple(expr: Any) -> bool:
    """Whether a Relax expression is a tuple."""
    return isinstance(type_of(expr), TupleType)


def is_shape(expr: Any) -> bool:
    """Whether a Relax expression is a shape."""
    return isinstance(type_of(expr), ShapeType)


def dtype_of(expr: Any) -> str:
    """The dtype of a Relax tensor or prim expression, as TVM's string."""
    ty = type_of(expr)
    return str(ty.dtype)


def shape_values(ty: Any) -> list[Any] | None:
    """The sizes of a tensor or shape type; None where they are unknown."""
    shape = ty if isinstance(ty, ShapeType) else ty.shape
    if shape is None or shape.values is None:
        return None
    return [const_int(v) for v in shape.values]


def const_int(value: Any) -> Any:
    """A constant prim expression as a Python int; anything else unchanged."""
    if isinstance(value, tirx.IntImm):
        return int(value.value)
    return value


def shape_expr(sizes: Any) -> Any:
    """Sizes, ints or prim expressions, as a Relax shape."""
    return relax.ShapeExpr([tirx.const(s, "int64") if isinstance(s, int) else s for s in sizes])


def const_number(expr: Any) -> bool | int | float | None:
    """The number that a 0-d Relax constant holds (`data` before TVM 0.27); None for all else."""
    if isinstance(expr, tvm.ir.Call) and expr.op == tvm.ir.Op.get("relax.astype"):
        return const_number(expr.args[0])  # bfloat16 has no constants of its own
    value = getattr(expr, "value", None)
    if not isinstance(expr, tvm.ir.GenericConst) or not isinstance(value, TVMTensor):
        return None
    number: bool | int | float | None = None if value.shape else value.numpy().item()
    return number


def cpu_features() -> list[str]:
    """The processor that LLVM sees, and what it can do."""
    codegen = "tvm.codegen.llvm."
    name = tvm.get_global_func(f"{codegen}GetHostCPUName", allow_missing=True)
    found = tvm.get_global_func(f"{codegen}GetHostCPUFeatures", allow_missing=True)
    features = found() if found is not None else {}
    return [
        str(name()) if name is not None else "",
        *sorted(f"{k}={v}" for k, v in features.items()),
    ]


def rpc() -> Any:
    """TVM's module for other devices; an ImportError with the remedy where it lacks packages."""
    try:
        import tvm.rpc
    except ImportError as error:
        raise ImportError(
            f"measuring on other devices: {error}; `pip install 'apache-tvm[rpc]'` mends it"
        ) from error
    return tvm.rpc


def register_global_func(name: str, function: Any) -> None:
    """Make a Python function callable from Relax and TIR by name; replaces an older one."""
    tvm_ffi.register_global_func(name, function, override=True)


def remove_global_func(name: str) -> None:
    """Undo `register_global_func`; an unknown name is ignored."""
    if tvm_ffi.get_global_func(name, allow_missing=True) is not None:
        tvm_ffi.remove_global_func(name)


def from_onnx(proto: Any) -> Any:
    """An ONNX model through TVM's own importer, its weights as constants; needs `onnx`."""
    from tvm.relax.frontend.onnx import from_onnx as imported

    return imported(proto)


def from_torch(tensor: Any) -> Any:
    """A PyTorch tensor as a TVM tensor that shares its memory."""
    return tvm_ffi.from_dlpack(tensor.detach())  # TVM's own asks for 64-byte addresses
