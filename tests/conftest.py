"""Long tables of rows that are alike are sampled, unless they are asked for."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import switches as switches

# One row in as many of a table is run by a plain `pytest`, where its mark does not say how many.
_SHARE = 12


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every row of the long tables")


def _sampled(config: pytest.Config) -> bool:
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return everything and not config.option.whole and not config.option.keyword


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker, which is given another command line."""
    node.workerinput["sampled"] = _sampled(node.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    given = getattr(config, "workerinput", None)
    if not (_sampled(config) if given is None else given["sampled"]):
        return
    left = {i for i in items if i.get_closest_marker("whole")}
    tables: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark is not None:
            (share,) = mark.args or (_SHARE,)
            tables.setdefault((item.nodeid.partition("[")[0], share), []).append(item)
    for (_, share), rows in tables.items():
        # Rows side by side are alike. One of them is run, not the same of each few: what a table
        # repeats would then be left out.
        for few in (rows[n : n + share] for n in range(0, len(rows), share)):
            del few[zlib.crc32(few[0].nodeid.encode()) % len(few)]
            left.update(few)
    config.hook.pytest_deselected(items=list(left))
    items[:] = [i for i in items if i not in left]


@pytest.fixture
def fresh() -> Iterator[None]:
    """A seeded test that finds nothing compiled, and leaves nothing."""
    import torch

    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
