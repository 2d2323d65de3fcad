"""Walk a functional ATen graph, call each node's converter, emit and check what it returns."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from fx2relax import kept, library_calls, objects, routes, stages
from fx2relax.accept import accept
from fx2relax.casting import cast
from fx2relax.compat import (
    AnyType,
    BlockBuilder,
    Expr,
    ShapeType,
    Var,
    dtype_of,
    op,
    relax,
    threads_apart,
)
from fx2relax.complexes import Complex, constant
from fx2relax.control_flow import Choices
from fx2relax.errors import (
    Fx2RelaxError,
    ImportFailure,
    Refused,
    Unsupported,
    UnsupportedOpError,
    missing_ops,
    source_line,
    target_name,
)
from fx2relax.folded import Value, folded
from fx2relax.imported import Imported
from fx2relax.outputs import arrange
from fx2relax.params import InputSpec, in_relax_order
from fx2relax.printing import Prints
from fx2relax.promotion import promoted
from fx2relax.registry import Converter, shipped
from fx2relax.scalars import NO_OPERATION, Scalars
from fx2relax.shapes import SymbolTable
from fx2relax.storages import Storages, is_strided
from fx2relax.told import tell
from fx2relax.torch_calls import TorchCalls
from fx2relax.variables import as_captured, unbound_symbols, variable

Node = torch.fx.Node
_NUMBERS = (torch.SymInt, torch.SymBool, torch.SymFloat, bool, int, float)


class Importer:
    """Imports one graph; see `import_graph`."""

    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        inputs: Sequence[InputSpec],
        *,
        symbols: SymbolTable | None = None,
        name: str = "main",
        on_unsupported: str = "torch",
        library: str = "none",
        output_strides: bool = False,
        halves: bool = False,
        single: bool = False,
        fold: bool = False,
        builder: BlockBuilder | None = None,
        io: bool = False,
    ) -> None:
        self.graph_module = graph_module
        self.inputs = list(inputs)
        self.symbols = symbols or SymbolTable()
        self.name = name
        self.on_unsupported = on_unsupported
        self.library = library
        self.output_strides = output_strides
        self.halves = halves
        self.single = single
        self.fold = fold
        self.folded: dict[Node, Value] = {}
        self.nested = builder is not None
        threads_apart()
        self.builder = builder or BlockBuilder()
        self.scalars = Scalars(self.symbols, self.builder)
        self.env: dict[Node, Any] = {}
        self.declined: list[tuple[Node, str]] = []
        self.calls = TorchCalls(self)
        self.storages = Storages(self)
        self.choices = Choices(self, self._branch)
        self.prints = Prints(self, Var("_io", AnyType()) if io else None)
        self.nodes = 0
        self.converted = 0

    def run(self) -> Imported:
        """Import the graph. Raises UnsupportedOpError, ImportFailure."""
        nodes = list(self.graph_module.graph.nodes)
        self._refuse_missing(nodes)
        self._lift_constants(nodes)
        if self.fold:
            self.folded = folded(nodes)
        self.choices.prepare(nodes)
        params, num_input = in_relax_order(self.inputs)
        variables = {id(spec): self.param(spec) for spec in params}
        arguments = [variables[id(spec)] for spec in params]
        solved = unbound_symbols(params)
        if solved:
            sizes = Var("sizes", ShapeType([self.symbols.var(s) for s in solved]))
            arguments.insert(num_input, sizes)
        if self.prints.io is not None:
            arguments.insert(num_input + bool(solved), self.prints.io)
        count = num_input + bool(solved) + (self.prints.io is not None)
        attrs = None if self.nested else {"num_input": count}
        with self.builder.function(self.name, arguments, attrs=attrs, private=self.nested):
            with self.builder.dataflow():
                self._bind_inputs(nodes, variables)
                for node in nodes:
                    if node.op in ("call_function", "get_attr"):
                        self._visit(node)
                output_node = next(n for n in reversed(nodes) if n.op == "output")
                results, outputs = arrange(self, output_node, variables)
                whole = results[0] if self.single else relax.Tuple(results)
                if self.prints.io is not None:
                    whole = relax.Tuple([whole, relax.Tuple([self.prints.io])])
                result = self.builder.emit_output(whole)
            self.builder.emit_func_output(result)
        if self.declined and self.on_unsupported == "raise" and not self.nested:
            raise UnsupportedOpError(missing_ops(self.declined))
        mod = self.builder.get()
        if stages.is_wanted("imported") and not self.nested:
            mod = tell(self, mod, nodes)
        return Imported(
            mod=mod,
            name=self.name,
            params=params,
            num_input=num_input,
            outputs=outputs,
            torch_calls=self.calls.made,
            symbols=self.symbols,
            solved=solved,
            nodes=self.nodes,
            converted=self.converted,
        )

    # -- before the walk ---------------------------------------------------------------------

    def _refuse_missing(self, nodes: Sequence[Node]) -> None:
        """List every operator without a route before anything is converted."""
        if self.on_unsupported != "raise":
            return
        missing = [
            (node, "")
            for node in nodes
            if node.op == "call_function"
            and not (routes.has_route(node) or self.prints.takes(node))
            and not (self.library == "torch" and routes.library_decides(node, None))
        ]
        if missing:
            raise UnsupportedOpError(missing_ops(missing))

    def _lift_constants(self, nodes: Sequence[Node]) -> None:
        """Tensors that the graph holds as attributes become weights, each of them once."""
        known = {id(spec.value): spec for spec in self.inputs if spec.value is not None}
        self.attributes: dict[Node, InputSpec | Any] = {}
        for node in nodes:
            if node.op != "get_attr":
                continue
            value = operator.attrgetter(str(node.target))(self.graph_module)
            if not isinstance(value, torch.Tensor) or not routes.is_held(value):
                self.attributes[node] = value
                continue
            if self.nested:
                self.attributes[node] = constant(value)
                continue
            if id(value) not in known:
                name = str(node.target).lstrip("_")
                spec = InputSpec(name, "constant", value, value=value, position=-1)
                known[id(value)] = spec
                self.inputs.append(spec)
            self.attributes[node] = known[id(value)]

    def _branch(
        self, graph: torch.fx.GraphModule, inputs: Sequence[InputSpec], name: str
    ) -> Importer:
        return Importer(
            graph,
            inputs,
            symbols=SymbolTable(self.symbols.ranges),
            name=name,
            on_unsupported=self.on_unsupported,
            library=self.library,
            halves=self.halves,
            builder=self.builder,
        )

    def param(self, spec: InputSpec) -> Any:
        """A Relax variable for an input of the graph."""
        unique = spec.kind == "user" and not self.nested
        spec.relax_name = self.builder.get_unique_name(spec.name) if unique else spec.name
        return variable(spec, self.symbols)

    def _bind_inputs(self, nodes: Sequence[Node], variables: dict[int, Any]) -> None:
        placeholders = [n for n in nodes if n.op == "placeholder"]
        for node, spec in zip(placeholders, self.inputs, strict=False):
            if not spec.passed:
                self.env[node] = spec.val
                continue
            self.env[node] = self._logical(spec, variables[id(spec)])
            if spec.storage is not None:
                self.storages.give(node, variables[id(spec)], spec.storage)
            if isinstance(spec.val, torch.SymFloat):
                self.scalars.bind_float(spec.val, self.env[node])
        for node, value in self.attributes.items():
            if isinstance(value, InputSpec):
                self.env[node] = self._logical(value, variables[id(value)])
            else:
                self.env[node] = value

    def _logical(self, spec: InputSpec, var: Any) -> Any:
        return as_captured(spec, var, self.symbols, self.builder)

    # -- the walk ----------------------------------------------------------------------------

    def _visit(self, node: Node) -> None:
        if node.op == "get_attr":
            self.env.setdefault(node, self.attributes.get(node))
            return
        val = node.meta.get("val")
        if isinstance(val, _NUMBERS) and self.scalars.known(val):
            self.env[node] = self.scalars.value(val)
            return
        if node.target in NO_OPERATION or self._holds(node) or self.prints.take(node):
            self.env[node] = None
            return
        if node.target is operator.getitem:
            self.env[node] = self._getitem(node)
            return
        self.nodes += 1
        if node in self.folded:
            self.converted += 1
            self.env[node] = pytree.tree_map(constant, self.folded[node])
            return
        try:
            self.scalars.locate(node, self._argument)
            self.env[node] = self._convert(node)
        except Fx2RelaxError:
            raise
        except Exception as error:
            raise ImportFailure(
                f"the converter of {target_name(node.target)} failed at "
                f"{source_line(node) or node.format_node()}: {type(error).__name__}: {error}"
            ) from error

    def _holds(self, node: Node) -> bool:
        """Whether a node asserts what can be proved here and now."""
        if node.target is not torch.ops.aten._assert_scalar.default:
            return False
        condition = self._argument(node.args[0])
        if isinstance(condition, (bool, int)):
            return bool(condition)
        return bool(self.symbols.analyzer.can_prove(condition))

    def _getitem(self, node: Node) -> Any:
        source, index = node.args
        value = self.env[source]  # type: ignore[index]
        if isinstance(value, (tuple, list)):
            return value[index]  # type: ignore[index]
        return self.builder.emit(relax.TupleGetItem(value, index), node.name)

    def _convert(self, node: Node) -> Any:
        target = node.target
        reason = ""
        if node in self.choices.made:
            self.converted += 1
            return accept(self, node, self.choices.emit(node))
        if target is kept.kept_call:
            call = kept.kept(node.args[0])  # type: ignore[arg-type]
            args, kwargs = call.bind([self._argument(a) for a in node.args[1:]])
            self.converted += 1
            return accept(self, node, tuple(call.flatten(call.converter.function(*args, **kwargs))))
        if target is torch.ops.aten._local_scalar_dense.default and routes.plain_node(node):
            try:
                return self.scalars.item(node.meta["val"], self._argument(node.args[0]), node.name)
            except Unsupported as declined:
                reason = str(declined)
        converter = routes.converter_of(node)
        if converter is None or shipped(converter):
            refused = routes.refusal(node, self.halves)
            if refused is not None:
                return self._decline(node, refused)
        if self.library == "torch" and routes.library_decides(node, converter):
            self.converted += 1
            return self.calls.emit(node, library=True)
        if self.library == "torch" and library_calls.takes(node, converter):
            self.converted += 1
            return accept(self, node, library_calls.emit(self, node))
        if converter is not None:
            try:
                result = accept(self, node, self._call(converter, node))
                self.converted += 1
                return result
            except Refused as declined:
                return self._decline(node, str(declined))
            except Unsupported as declined:
                reason = str(declined)
        if routes.plain_node(node):
            graph = routes.decompose(node)
            if graph is not None:
                result = self._inline(graph, node)
                self.converted += 1
                return result
        return self._decline(node, reason)

    def _decline(self, node: Node, reason: str) -> Any:
        """Let PyTorch run a node, and remember why."""
        self.declined.append((node, reason))
        return self.calls.emit(node)

    def _call(self, converter: Converter, node: Node) -> Any:
        args = [self._argument(a) for a in node.args]
        kwargs = {k: self._argument(a) for k, a in node.kwargs.items()}
        if is_strided(node):
            return self.storages.call(node, converter.function, args, kwargs)
        if converter.promote is None:
            return converter.function(*args, **kwargs)
        args, kwargs, result_dtype = promoted(converter, node, args, kwargs)
        result = converter.function(*args, **kwargs)
        if isinstance(result, Expr):
            result = self.builder.normalize(result)
            if dtype_of(result) != result_dtype:
                result = op.astype(result, result_dtype)
        elif isinstance(result, Complex):
            result = result.map(lambda part: cast(part, result_dtype))
        return result

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self.env[value]
        if isinstance(value, (list, tuple)):
            return [self._argument(v) for v in value]
        if isinstance(value, dict):
            return {k: self._argument(v) for k, v in value.items()}
        return value

    def _inline(self, graph: torch.fx.GraphModule, node: Node) -> Any:
        """Import the nodes of a node's decomposition in its place."""
        inner = list(graph.graph.nodes)
        operands = [v for v in routes.flat_arguments(node) if isinstance(v, Node)]
        placeholders = [n for n in inner if n.op == "placeholder"]
        for placeholder, operand in zip(placeholders, operands, strict=True):
            self.env[placeholder] = self.env[operand]
        for child in inner:
            if child.op == "get_attr":
                self.env[child] = constant(operator.attrgetter(str(child.target))(graph))
            elif child.op == "call_function":
                child.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
                self._visit(child)
                self.nodes -= child.target is not operator.getitem
            elif child.op == "output":
                results = [self._argument(v) for v in pytree.tree_leaves(child.args[0])]
                val = node.meta["val"]
                return accept(
                    self, node, tuple(results) if isinstance(val, (tuple, list)) else results[0]
                )
        raise ImportFailure(f"the decomposition of {target_name(node.target)} has no output")


def import_graph(
    graph_module: torch.fx.GraphModule, inputs: Sequence[InputSpec], **options: Any
) -> Imported:
    """Import a functional ATen graph as a Relax function.

    Args:
        graph_module: every node carries its fake value in ``meta["val"]``.
        inputs: one `InputSpec` per placeholder, in the graph's order.
        options: see `Importer`.

    Raises:
        UnsupportedOpError: ``on_unsupported="raise"`` and operators without a route.
        ImportFailure: a converter raised, or disagrees with PyTorch in shape or dtype.
    """
    importer = Importer(graph_module, inputs, **options)
    with importer.symbols.active(), objects.collecting() as used:
        imported = importer.run()
    imported.mod = objects.carried(imported.mod, imported.name, used)
    return imported
