"""How large the tiles of a contraction are: registers, caches and threads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .target import has_features

# Bytes that a tile may take of the second-level cache, which is 256 KiB or more on any machine
# that is worth tuning for: the packed columns and the sums each.
_CACHE = 128 << 10
_DEPTH = 384
_COLUMNS = 64
_ROWS = 256


@dataclass(frozen=True)
class Registers:
    """The tile that one run of the inner loop sums up in registers.

    `rows` rows of `lanes` columns, 32-bit floats; `vectors` registers hold the lanes of a row.
    """

    rows: int
    lanes: int
    vectors: int


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles, in elements.

    `rows` and `lanes` are the register tile, `chains` how many sums each of its elements is split
    into, `block` and `columns` the rows and columns of the tile that stays in cache, of which
    `depth` products are added at a time.
    """

    rows: int
    lanes: int
    chains: int
    block: int
    columns: int
    depth: int


def registers(target: Any) -> Registers:
    """The register tile for a target's vector registers."""
    if str(target.export().get("mtriple", "")).startswith(("aarch64", "arm64")):
        return Registers(6, 16, 4)
    if has_features(target, "avx512f"):
        return Registers(12, 32, 2)
    if has_features(target, "avx2", "fma"):
        return Registers(6, 16, 2)
    if has_features(target, "neon"):
        return Registers(6, 16, 4)
    return Registers(4, 8, 2)


def lanes_of(target: Any, dtype: str) -> int:
    """How many columns the register tile has, and so the panels of a packed matrix."""
    return registers(target).lanes // (2 if dtype == "float64" else 1)


def choose(
    rows: int | None,
    depth: int | None,
    columns: int | None,
    batch: int | None,
    *,
    target: Any,
    dtype: str,
    threads: int,
) -> Tiles:
    """Tiles for a contraction of these sizes, None where a size is not known."""
    size = registers(target)
    lanes = lanes_of(target, dtype)
    height = _height(size.rows, rows)
    chains = 1
    while height * size.vectors * chains < 8:
        chains *= 2
    deep = _even(depth, _DEPTH)
    block = height * max(_ROWS // height, 1)
    if rows is not None:
        block = min(_even(rows, block, height), block)
    wide = lanes * max(_COLUMNS // lanes, 1)
    if columns is not None:
        wide = min(wide, -(-columns // lanes) * lanes)
        while wide > lanes and _tasks(rows, block, columns, wide, batch) < 4 * threads:
            wide -= lanes
    return Tiles(height, lanes, chains, block, wide, deep)


def _tasks(rows: int | None, block: int, columns: int, wide: int, batch: int | None) -> float:
    if rows is None or batch is None:
        return math.inf
    return batch * math.ceil(rows / block) * math.ceil(columns / wide)


def _height(most: int, rows: int | None) -> int:
    """The height of the register tile that computes the fewest rows in vain."""
    if rows is None:
        return most
    # What a tile costs besides its rows: the loads of `y`.
    costs = {h: math.ceil(rows / h) * (h + 0.5) for h in range(1, most + 1)}
    return min(costs, key=lambda h: (costs[h], -h))


def _even(size: int | None, most: int, step: int = 1) -> int:
    """The largest part when a size is cut into equal parts of at most `most`."""
    if size is None:
        return most
    part = math.ceil(size / max(math.ceil(size / most), 1))
    return max(math.ceil(part / step) * step, step)


def rows_of_plane(height: int, width: int, tiles: Tiles) -> int:
    """How many lines of a plane (height, width) one tile has, for few columns in vain."""
    line = tiles.depth * width * 4
    most = max(min(height, _CACHE // line, 256 // width), 1)

    def cost(lines: int) -> float:
        panels = math.ceil(lines * width / tiles.lanes)
        return math.ceil(height / lines) * (panels + 0.25)

    return min(range(1, most + 1), key=lambda lines: (cost(lines), -lines))
