"""Sizes and structures of artifacts: how they are spelled, read back and solved."""

from __future__ import annotations

import json
import math

import pytest

from fx2relax.deploy import structure
from fx2relax.deploy.sizes import Shown, Unsolved, parse, solve
from fx2relax.deploy.structure import Argument, At, Constant, Keyed, Several, SizeOf
from fx2relax.errors import ArgumentError


@pytest.mark.parametrize(
    ("text", "sizes", "value"),
    [
        (7, {}, 7),
        ("n", {"n": 3}, 3),
        ("2 * n + 1", {"n": 3}, 7),
        ("(n - 1) // 2 * 2", {"n": 6}, 4),
        ("-n % 4", {"n": 3}, 1),
        ("min(n, 5) + max(m, 1, 2)", {"n": 9, "m": 0}, 7),
    ],
)
def test_expressions_have_values(text, sizes, value):
    assert parse(text).value(sizes) == value
    assert parse(text).names == sizes.keys()


@pytest.mark.parametrize(
    "text",
    [
        *("", "n n", "n.real", "f(n)", "min(n)", "min(n, key=n)", "[n]", "n / 2", "n ** 9", "1.5"),
        *("'n'", "lambda: 0", "n if n else 1", "True", "n < 2", "n := 1", "min", "if"),
    ],
)
def test_other_text_is_no_size(text):
    with pytest.raises(ValueError, match=r"size|part"):
        parse(text)


def shown(*rows):
    return [Shown(parse(wanted), given, f"axis {n}") for n, (wanted, given) in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "known", "wanted"),
    [
        ([("n", 4)], {}, {"n": 4}),
        ([("2 * n + 1", 9)], {}, {"n": 4}),
        ([("3 - n", 1)], {}, {"n": 2}),
        ([("n + m", 9), ("m", 4)], {}, {"n": 5, "m": 4}),
        ([("n * m", 12), ("m", 4)], {}, {"n": 3, "m": 4}),
        ([("n + k // 2", 9)], {"k": 5}, {"n": 7, "k": 5}),
        ([("a + b", 7), ("b + c", 9), ("c", 4)], {}, {"a": 2, "b": 5, "c": 4}),
        ([("n // 2", 3)], {}, {}),  # two sizes would do: nothing is guessed
        ([("n // 2", 3), ("n", 7)], {}, {"n": 7}),
        ([("n * n", 9)], {}, {}),
        ([("n - n", 0)], {}, {}),
    ],
)
def test_names_are_found(rows, known, wanted):
    assert solve(shown(*rows), known) == wanted


@pytest.mark.parametrize(
    ("rows", "known", "message"),
    [
        ([("n", 4), ("n", 5)], {}, "'n' is 5 in axis 1, and 4 in axis 0"),
        ([("n", 4)], {"n": 5}, "'n' is 4 in axis 0, and 5 in the weights"),
        (
            [("n", 4), ("2 * n", 9)],
            {},
            r"axis 1 is 9, and has to be 2 \* n = 8 \(n = 4 in axis 0\)",
        ),
        ([("7", 8)], {}, "axis 0 is 8, and has to be 7"),
        ([("2 * n", 9)], {}, r"axis 0 is 9, and has to be 2 \* n"),
        ([("n", 4), ("8 // (n - 4)", 1)], {}, "axis 1 is 1, and has to be 8"),
    ],
)
def test_contradictions_are_named(rows, known, message):
    with pytest.raises(Unsolved, match=message):
        solve(shown(*rows), known)


TREE = Keyed(
    (
        ("a", Several("list", (At(0), Several("tuple", ())))),
        (3, Constant(-math.inf)),
        ("b", Several("tuple", (Argument(1), SizeOf("2 * n"), Constant(None), Constant("x")))),
        ("c", Several("tuple", (Constant(True), Constant(1.5), Constant(2)))),
    )
)


def test_a_structure_survives_json():
    assert structure.from_json(json.loads(json.dumps(structure.to_json(TREE)))) == TREE
    (nan,) = structure.leaves(structure.from_json(structure.to_json(Constant(math.nan))))
    assert math.isnan(nan.value)


def test_structures_are_made_of_values():
    leaf = object()
    value = {"a": [leaf, (1, None)], 2: {"b": "text"}}
    node = structure.of(value, lambda v: At(0) if v is leaf else None)
    assert structure.put_together(node, lambda _: leaf) == value
    for bad in ({(1, 2): 3}, {"a": {1.5: 1}}, {1, 2}, object()):
        with pytest.raises(TypeError):
            structure.of(bad, lambda _: None)


@pytest.mark.parametrize(
    ("node", "good", "bad"),
    [
        (Constant(math.nan), math.nan, 1.0),
        (Constant(1), 1, 1.0),
        (Constant(True), True, 1),
        (Constant(None), None, 0),
        (Several("tuple", (Constant(1),)), [1], (1, 1)),
        (Keyed((("a", Constant(1)),)), {"a": 1}, {"b": 1}),
        (Keyed((("a", Constant(1)),)), {"a": 1}, [1]),
    ],
)
def test_arguments_are_as_they_were_exported(node, good, bad):
    structure.take_apart(node, good, "x", lambda *_: None)
    with pytest.raises(ArgumentError, match="argument 'x"):
        structure.take_apart(node, bad, "x", lambda *_: None)
