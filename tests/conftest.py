"""Long tables of rows that are alike are sampled, unless they are asked for."""

from __future__ import annotations

import zlib

import pytest

# One row in as many is run by a plain `pytest`.
_SHARE = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every row of the long tables")


def pytest_configure(config: pytest.Config) -> None:
    """Decide once: workers are given the options, and another command line."""
    if not hasattr(config, "workerinput"):
        everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        config.option.sampled = everything and not config.option.whole and not config.option.keyword


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.sampled:
        return
    left = [i for i in items if i.get_closest_marker("sweep") and not _chosen(i)]
    config.hook.pytest_deselected(items=left)
    items[:] = [i for i in items if i not in set(left)]


def _chosen(item: pytest.Item) -> bool:
    return zlib.crc32(item.nodeid.encode()) % _SHARE == 0
