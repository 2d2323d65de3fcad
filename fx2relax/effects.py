"""Operators with effects: AOTAutograd orders them by tokens, the importer by their own order."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.effects import with_effects


class Tokens(dict[Any, Any]):
    """The tokens of a functional trace, each made when the first operator asks for it."""

    def __contains__(self, kind: object) -> bool:
        if not super().__contains__(kind):
            self[kind] = torch.empty(0)
        return True


def drop_tokens(graph_module: torch.fx.GraphModule) -> None:
    """Replace each ``with_effects(token, op, ...)`` by ``op(...)``; the tokens become None."""
    graph = graph_module.graph
    found = [n for n in graph.nodes if n.op == "call_function" and n.target is with_effects]
    for node in found:
        token, target, *args = node.args
        with graph.inserting_before(node):
            plain = graph.call_function(target, tuple(args), dict(node.kwargs))
        value = node.meta["val"][1:]
        plain.meta = {**node.meta, "val": value[0] if len(value) == 1 else value or None}
        for user in list(node.users):
            user.replace_all_uses_with(_result(graph, plain, token, user, len(value)))
            graph.erase_node(user)
        graph.erase_node(node)
        if isinstance(token, torch.fx.Node) and token.op == "placeholder":
            token.meta["val"] = None
        elif isinstance(token, torch.fx.Node) and not token.users:
            graph.erase_node(token)
    if found:
        graph_module.recompile()


def _result(graph: torch.fx.Graph, plain: Any, token: Any, user: Any, count: int) -> Any:
    """What stands for one result of `with_effects`, the first of which is the next token."""
    index = user.args[1]
    if index == 0:
        return token
    if count == 1:
        return plain
    with graph.inserting_before(user):
        item = graph.call_function(operator.getitem, (plain, index - 1))
    item.meta = dict(user.meta)
    return item
