"""Reports as pages, as JSON and as pictures."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import fx2relax
from fx2relax.explaining.report import Kernel, Line, Node

pytestmark = pytest.mark.usefixtures("fresh")


class _Tags(HTMLParser):
    """Checks that what is opened is closed."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_json_and_pictures(tmp_path: Path) -> None:
    convolution = nn.Conv2d(16, 32, 3, padding=1)
    layers = nn.Sequential(convolution, nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)).eval()
    report = fx2relax.explain(layers, torch.randn(2, 16, 20, 20)).measure(0.2)
    report.save(str(tmp_path / "report.html"))
    tags = _Tags()
    tags.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert tags.open == []
    assert {"table", "details", "pre"} <= tags.seen
    assert report._repr_html_() in report.to_html()
    report.save(str(tmp_path / "report.json"))
    said = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert re.match(
        r"A call is the mean of the faster half of \d+, on \d+ thread", said["measured"]
    )
    assert said["measured"] in report.to_html()
    assert said["measured"] in " ".join(str(report).split())
    assert said["graphs"][0]["kernels"][0]["seconds"] > 0
    for kind in ("layers", "timeline", "roofline", "levels"):
        report.plot(kind).savefig(tmp_path / f"{kind}.png")
        assert (tmp_path / f"{kind}.png").stat().st_size > 2000
    with pytest.raises(ValueError, match="no plot is called 'pie'"):
        report.plot("pie")


def test_a_picture_without_times() -> None:
    report = fx2relax.explain(lambda x: x.sin(), torch.randn(5))
    with pytest.raises(ValueError, match=r"call measure\(\) first"):
        report.plot("layers")
    report.plot("levels")


def test_what_a_model_says_is_escaped() -> None:
    report = fx2relax.explain(lambda x: x.where(x < 2, -x), torch.randn(5))
    node = Node("a<b", "<script>", Line("<file>", 3, "a < b & c"), why="<why>")
    report.data.graphs[0].nodes.append(node)
    report.data.graphs[0].kernels.append(Kernel(0, "<kernel>", "generated", ["a<b"]))
    page = report.to_html()
    for text in ("<script>", "<file>", "<why>", "<kernel>", "a < b & c"):
        assert text not in page
