"""Long tables of rows that are alike are sampled, unless they are asked for."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import switches as switches

# One row in as many is run by a plain `pytest`.
_SHARE = 6


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
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, rows in tables.items():
        # Rows side by side are alike: which of them is run depends on the table, and one always is.
        first = zlib.crc32(name.encode()) % min(_SHARE, len(rows))
        left.update(set(rows) - set(rows[first::_SHARE]))
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
