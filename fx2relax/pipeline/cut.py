"""The cheapest of all ways to give each of many things one of two labels."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

_EPS = 1e-9


class Labels:
    """Labels 0 and 1, with costs of each by itself and of two that differ: a minimum cut.

    Costs are numbers from 0 to infinity.
    """

    def __init__(self) -> None:
        self._index: dict[Hashable, int] = {}
        self._edges: list[list[int]] = [[], []]  # of the two labels themselves, and of the things
        self._heads: list[int] = []
        self._left: list[float] = []

    def cost(self, thing: Hashable, label: int, cost: float) -> None:
        """Let a label of a thing cost something."""
        # A thing is on the side of its label; what is cut off from the other side pays.
        place = self._place(thing)
        ends = (place, 1) if label == 0 else (0, place)
        self._connect(*ends, cost, 0.0)

    def differ(self, one: Hashable, other: Hashable, cost: float) -> None:
        """Let it cost something that two things have different labels."""
        if one != other:
            self._connect(self._place(one), self._place(other), cost, cost)

    def cheapest(self) -> tuple[set[Hashable], float]:
        """The things to label 1, and what all labels cost together."""
        total = 0.0
        while levels := self._levels():
            turns = [0] * len(self._edges)
            while pushed := self._push(levels, turns):
                total += pushed
        reached = self._reached()
        return {thing for thing, place in self._index.items() if place not in reached}, total

    def _place(self, thing: Hashable) -> int:
        if thing not in self._index:
            self._index[thing] = len(self._edges)
            self._edges.append([])
        return self._index[thing]

    def _connect(self, tail: int, head: int, there: float, back: float) -> None:
        for start, end, room in ((tail, head, there), (head, tail, back)):
            self._edges[start].append(len(self._heads))
            self._heads.append(end)
            self._left.append(room)

    def _reached(self) -> dict[int, int]:
        """How far from label 0 everything is that can still be reached from it."""
        found, queue = {0: 0}, deque([0])
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                head = self._heads[edge]
                if self._left[edge] > _EPS and head not in found:
                    found[head] = found[node] + 1
                    queue.append(head)
        return found

    def _levels(self) -> dict[int, int]:
        found = self._reached()
        return found if 1 in found else {}

    def _push(self, levels: dict[int, int], turns: list[int]) -> float:
        """Send along one shortest way what it can take (Dinic's algorithm)."""
        path: list[int] = []
        node = 0
        while node != 1:
            edges = self._edges[node]
            while turns[node] < len(edges):
                edge = edges[turns[node]]
                head = self._heads[edge]
                if self._left[edge] > _EPS and levels.get(head) == levels[node] + 1:
                    break
                turns[node] += 1
            if turns[node] < len(edges):
                path.append(edges[turns[node]])
                node = self._heads[path[-1]]
                continue
            if not path:
                return 0.0
            edge = path.pop()
            node = self._heads[edge ^ 1]
            turns[node] += 1
        room = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= room
            self._left[edge ^ 1] += room
        return room
