"""Rewriting of loops and expressions: TVM 0.27 has no mutator that Python can derive from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tvm
from tvm import s_tir, tirx

from .present import Wanted, present
from .quicker import elements

_log = logging.getLogger(__name__)
Call = tvm.ir.Call
TensorLoad = tvm.ir.expr.TensorLoad  # what tirx.BufferLoad makes

_BINARY: tuple[Any, ...] = (
    tirx.Add,
    tirx.Sub,
    tirx.Mul,
    tirx.Div,
    tirx.Mod,
    tirx.FloorDiv,
    tirx.FloorMod,
    tirx.Min,
    tirx.Max,
    tirx.EQ,
    tirx.NE,
    tirx.LT,
    tirx.LE,
    tirx.GT,
    tirx.GE,
    tirx.And,
    tirx.Or,
    tirx.BitwiseAnd,
    tirx.BitwiseOr,
    tirx.BitwiseXor,
    tirx.LShift,
    tirx.RShift,
)


def kernel_pass(name: str, rewrite: Callable[[Any], Any], wanted: Wanted | None = None) -> Any:
    """A TVM pass that puts ``rewrite(kernel)`` in place of a kernel's body.

    A kernel that holds a node which the rewriter does not know stays as it is; others carry the
    pass's name as an attribute.

    Args:
        name: the pass's.
        rewrite: gives the body.
        wanted: see `present`: kernels in which there is none of these are not rewritten.
    """

    @tvm.tirx.transform.prim_func_pass(opt_level=0, name=name)  # type: ignore[untyped-decorator]
    def apply(func: Any, mod: Any, ctx: Any) -> Any:
        if wanted is not None and not present(func.body, wanted):
            return func
        try:
            return func.with_body(rewrite(func)).with_attr(name, True)
        except NotHandled as error:
            _log.debug("%s leaves a kernel as it is: it holds a %s", name, error)
            return func

    return apply


def with_body(realize: Any, body: Any, init: Any) -> Any:
    """A block, where it is realized, with another body and start of its reductions."""
    block = realize.block
    changed = s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        body,
        init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )
    return s_tir.SBlockRealize(realize.iter_values, realize.predicate, changed)


class NotHandled(Exception):
    """A node that the rewriter does not know: the kernel is left as it was."""


class Rewriter:
    """Rebuilds a statement bottom up; `leave` sees every expression after its operands.

    A derived class overrides `leave` for expressions and `visit_<Type>` for statements. Nodes
    without a change are kept, so that an untouched kernel costs no allocation.
    """

    def leave(self, node: Any) -> Any:
        """The replacement of an expression whose operands are rewritten already."""
        return node

    def expr(self, node: Any) -> Any:
        """Rewrite an expression."""
        handler = _EXPRS.get(type(node))
        if handler is None:
            raise NotHandled(type(node).__name__)
        return self.leave(handler(self, node))

    def exprs(self, nodes: Any) -> list[Any] | None:
        """Rewrite a list of expressions; None when none of them changed."""
        new, changed = [], False
        for old in nodes:
            made = self.expr(old)
            changed = changed or made is not old
            new.append(made)
        return new if changed else None

    def stmt(self, node: Any) -> Any:
        """Rewrite a statement."""
        kind = type(node).__name__
        own = getattr(self, f"visit_{kind}", None)
        if own is not None:
            return own(node)
        handler = _STMTS.get(kind)
        if handler is None:
            raise NotHandled(kind)
        return handler(self, node)

    def default(self, node: Any) -> Any:
        """Rewrite a statement as if the class did not treat its kind specially."""
        return _STMTS[type(node).__name__](self, node)

    def call(self, node: Any, args: list[Any]) -> Any:
        """A call with its arguments rewritten."""
        if all(a is b for a, b in zip(args, node.args, strict=True)):
            return node
        return Call(node.op, args, node.attrs, list(node.ty_args), ret_ty=node.ty)

    def bind(self, node: Any) -> Any:
        """Rewrite the value of a variable of the statements that follow."""
        value = node.value
        if type(value) not in _EXPRS:
            return node
        new = self.expr(value)
        return node if new is value else tirx.Bind(node.var, new)

    def store(self, node: Any) -> Any:
        """Rewrite a store's value and indices."""
        new = self.exprs([node.value, *elements(node.indices)])
        return node if new is None else tirx.BufferStore(node.buffer, new[0], new[1:])


def _binary(cls: Any) -> Callable[[Rewriter, Any], Any]:
    def handle(self: Rewriter, node: Any) -> Any:
        a, b = node.a, node.b
        x, y = self.expr(a), self.expr(b)
        return node if x is a and y is b else cls(x, y)

    return handle


def _not(self: Rewriter, node: Any) -> Any:
    a = node.a
    x = self.expr(a)
    return node if x is a else tirx.Not(x)


def _bitwise_not(self: Rewriter, node: Any) -> Any:
    a = node.a
    x = self.expr(a)
    return node if x is a else tirx.BitwiseNot(x)


def _cast(self: Rewriter, node: Any) -> Any:
    value = node.value
    x = self.expr(value)
    return node if x is value else tirx.Cast(node.ty.dtype, x)


def _select(self: Rewriter, node: Any) -> Any:
    new = self.exprs([node.condition, node.true_value, node.false_value])
    return node if new is None else tirx.Select(*new)


def _let(self: Rewriter, node: Any) -> Any:
    new = self.exprs([node.value, node.body])
    return node if new is None else tirx.Let(node.var, *new)


def _call(self: Rewriter, node: Any) -> Any:
    old = elements(node.args)
    new = self.exprs(old)
    return self.call(node, old if new is None else new)


def _load(self: Rewriter, node: Any) -> Any:
    new = self.exprs(elements(node.indices))
    return node if new is None else tirx.BufferLoad(node.source, new)


def _ramp(self: Rewriter, node: Any) -> Any:
    new = self.exprs([node.base, node.stride])
    return node if new is None else tirx.Ramp(*new, node.lanes)


def _broadcast(self: Rewriter, node: Any) -> Any:
    value = node.value
    x = self.expr(value)
    return node if x is value else tirx.Broadcast(x, node.lanes)


def _shuffle(self: Rewriter, node: Any) -> Any:
    new = self.exprs(list(node.vectors))
    return node if new is None else tirx.Shuffle(new, list(node.indices))


def _same(self: Rewriter, node: Any) -> Any:
    return node


_EXPRS: dict[Any, Callable[[Rewriter, Any], Any]] = {
    **{cls: _binary(cls) for cls in _BINARY},
    tirx.Not: _not,
    tirx.BitwiseNot: _bitwise_not,
    tirx.Cast: _cast,
    tirx.Select: _select,
    tirx.Let: _let,
    Call: _call,
    TensorLoad: _load,
    tirx.Ramp: _ramp,
    tirx.Broadcast: _broadcast,
    tirx.Shuffle: _shuffle,
    **dict.fromkeys((tvm.ir.Var, tirx.IntImm, tirx.FloatImm, tvm.ir.StringImm), _same),
}


def _seq(self: Rewriter, node: Any) -> Any:
    old = elements(node.seq)
    new = [self.stmt(s) for s in old]
    return node if all(a is b for a, b in zip(new, old, strict=True)) else tirx.SeqStmt(new)


def rebuild_for(
    node: Any, extent: Any, body: Any, kind: Any = None, *, first: Any = None, marked: bool = True
) -> Any:
    """The same loop with another extent, body, kind or first number; its marks kept or dropped."""
    annotations = node.annotations
    if not marked:
        annotations = {k: v for k, v in annotations.items() if not k.startswith("fx2relax.")}
    return tirx.For(
        node.loop_var,
        node.min if first is None else first,
        extent,
        node.kind if kind is None else kind,
        body,
        node.thread_binding,
        annotations,
        node.step,
    )


def length_of(extent: Any) -> int | None:
    """A loop's turns where they are known at compile time."""
    return int(extent.value) if isinstance(extent, tirx.IntImm) else None


def counted(
    name: str, dtype: Any, extent: Any, body: Callable[[Any], Any], kind: Any = tirx.ForKind.SERIAL
) -> Any:
    """A loop from 0, of which `body` makes the body of its variable."""
    var = tirx.Var(name, dtype)
    if not isinstance(extent, tvm.ir.Expr):
        extent = tirx.const(extent, dtype)
    return tirx.For(var, tirx.const(0, dtype), extent, kind, body(var))


def _for(self: Rewriter, node: Any) -> Any:
    old = node.body
    body = self.stmt(old)
    new = self.exprs([node.min, node.extent])
    if new is None:
        return node if body is old else rebuild_for(node, node.extent, body)
    return rebuild_for(node, new[1], body, first=new[0])


def _if(self: Rewriter, node: Any) -> Any:
    cond = self.expr(node.condition)
    then = self.stmt(node.then_case)
    other = None if node.else_case is None else self.stmt(node.else_case)
    if cond is node.condition and then is node.then_case and other is node.else_case:
        return node
    return tirx.IfThenElse(cond, then, other)


def _evaluate(self: Rewriter, node: Any) -> Any:
    value = node.value
    new = self.expr(value)
    return node if new is value else tirx.Evaluate(new)


def _return(self: Rewriter, node: Any) -> Any:
    value = node.value
    new = self.expr(value)
    return node if new is value else type(node)(new)


def _attr(self: Rewriter, node: Any) -> Any:
    old = node.body
    body = self.stmt(old)
    return node if body is old else tirx.AttrStmt(node.node, node.attr_key, node.value, body)


def _while(self: Rewriter, node: Any) -> Any:
    cond, body = self.expr(node.condition), self.stmt(node.body)
    return node if cond is node.condition and body is node.body else tirx.While(cond, body)


_STMTS: dict[str, Callable[[Any, Any], Any]] = {
    "SeqStmt": _seq,
    "For": _for,
    "IfThenElse": _if,
    "BufferStore": Rewriter.store,
    "Bind": Rewriter.bind,
    "Evaluate": _evaluate,
    "Return": _return,
    "AttrStmt": _attr,
    "While": _while,
    "AllocBuffer": _same,
    "DeclBuffer": _same,
    "AssertStmt": _same,
}


_EXTERN = tvm.ir.Op.get("tirx.call_pure_extern")


def extern(name: str, operands: Any, ty: Any) -> Any:
    """A call of a C function without effects."""
    return Call(_EXTERN, [tvm.ir.StringImm(name), *operands], ret_ty=ty)


def extern_name(node: Any) -> str | None:
    """Which C function a node calls; None if it is no such call."""
    if type(node) is not Call or not node.op.same_as(_EXTERN):
        return None
    return str(node.args[0].value)


def is_guard(node: Any) -> bool:
    """Whether an expression is an `if_then_else`, which computes one of its branches alone."""
    return type(node) is Call and getattr(node.op, "name", "").endswith(".if_then_else")


class Substitute(Rewriter):
    """Puts an expression in the place of each given variable."""

    def __init__(self, values: dict[Any, Any]):
        self.values = values

    def leave(self, node: Any) -> Any:
        """A variable's value."""
        return self.values.get(node, node) if type(node) is tvm.ir.Var else node


class _Search(Rewriter):
    def __init__(self, wanted: Callable[[Any], bool]):
        self.wanted = wanted
        self.found = False

    def expr(self, node: Any) -> Any:
        """Look into an expression, unless what is wanted was found."""
        return node if self.found else super().expr(node)

    def leave(self, node: Any) -> Any:
        self.found = self.found or self.wanted(node)
        return node


def holds(node: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether `wanted` is true of any part of an expression."""
    search = _Search(wanted)
    search.expr(node)
    return search.found


def uses(node: Any, var: Any) -> bool:
    """Whether an expression depends on a variable."""
    return holds(node, lambda part: type(part) is tvm.ir.Var and part.same_as(var))
