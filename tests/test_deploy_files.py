"""An artifact's files: written whole or not at all, and damage that is found and named."""

from __future__ import annotations

import json
import os
import shutil

import deploy_cases as cases
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from fx2relax import deploy
from fx2relax.deploy import ArtifactError, WeightFile
from fx2relax.deploy import folder as folders
from fx2relax.deploy.weight_file import Entry, write
from fx2relax.errors import WeightError


@pytest.fixture(scope="module")
def made():
    return cases.mlp()


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    return cases.saved(tmp_path_factory.mktemp("mlp") / "a", made)


@pytest.fixture
def mlp(whole, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(whole, tmp_path / "a")


def works(folder, weights=None):
    x = np.ones((2, 4), np.float32)
    found = deploy.load(folder).prefill(x)[0]
    np.testing.assert_allclose(found, cases.expected(x, weights or cases.WEIGHTS), rtol=1e-5)


def test_what_is_written(mlp):
    assert sorted(p.name for p in mlp.iterdir()) == [
        "library.so",
        "manifest.json",
        "weights.safetensors",
    ]
    text = json.loads((mlp / "manifest.json").read_text())
    assert text["fx2relax_artifact"] == 1
    assert text["weight_file"]["size"] == (mlp / "weights.safetensors").stat().st_size
    assert deploy.load(mlp).manifest == folders.read_manifest(mlp)


@pytest.mark.parametrize("name", ["library.so", "weights.safetensors", "manifest.json"])
def test_a_truncated_file_is_named(mlp, name):
    data = (mlp / name).read_bytes()
    cuts = {0, 1, 7, 8, 9, 63, 64, 100, len(data) - 64, len(data) - 2}
    for cut in sorted({*cuts, *range(0, len(data), max(1, len(data) // 40))}):
        (mlp / name).write_bytes(data[:cut])
        with pytest.raises(ArtifactError, match=name):
            deploy.load(mlp)
    (mlp / name).write_bytes(data)
    works(mlp)


@pytest.mark.parametrize("name", ["library.so", "weights.safetensors"])
def test_other_bytes_are_another_file(mlp, name):
    data = bytearray((mlp / name).read_bytes())
    data[len(data) - 5] ^= 1
    (mlp / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"{name} is not what was saved \(SHA-256"):
        deploy.load(mlp)
    (mlp / name).write_bytes(data + b"\0")
    with pytest.raises(ArtifactError, match=rf"{name} has \d+ bytes, and was saved with"):
        deploy.load(mlp)
    (mlp / name).unlink()
    with pytest.raises(ArtifactError, match=rf"{name} cannot be read"):
        deploy.load(mlp)


def test_the_weights_hash_may_be_left_unchecked(mlp):
    path = mlp / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    deploy.load(mlp, verify=False)
    path.write_bytes(data[:-1])
    with pytest.raises(ArtifactError, match="cut off"):
        deploy.load(mlp, verify=False)


def set_to(*keys_and_value):
    *keys, last, value = keys_and_value

    def edit(text):
        place = text
        for key in keys:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return edit


DESCRIPTION = ("functions", 0)
EDITS = [
    (set_to("fx2relax_artifact", 2), "of format 2, and this fx2relax reads format 1: install"),
    (set_to("fx2relax_artifact", 0), "of format 0.*: export the model again"),
    (set_to("fx2relax_artifact", None), "no 'fx2relax_artifact'"),
    (set_to("functions", None), "functions is missing"),
    (set_to("color", "red"), "color is unknown"),
    (set_to("functions", 3), "functions is '3', which is not tuple"),
    (set_to(*DESCRIPTION, "name", 3), r"functions\[0\]\.name is '3', which is not str"),
    (set_to(*DESCRIPTION, "name", "decode"), "function 'decode' is there twice"),
    (set_to(*DESCRIPTION, "weights", ["w"]), "takes the weight 'w', which there is not"),
    (set_to(*DESCRIPTION, "output", {"at": 1}), "result 1 is named, of 1"),
    (set_to(*DESCRIPTION, "output", {"at": -1}), r"functions\[0\]\.output: .* is not a structure"),
    (set_to(*DESCRIPTION, "output", {"up": 1}), r"functions\[0\]\.output: .* is not a structure"),
    (set_to(*DESCRIPTION, "arguments", []), "parameter 'x' and its arguments disagree"),
    (set_to(*DESCRIPTION, "symbol", "other"), "the library has no function 'other'"),
    (set_to(*DESCRIPTION, "parameters", 0, "kind", "tree"), "'tree' is no kind of parameter"),
    (set_to(*DESCRIPTION, "parameters", 0, "dtype", "f4"), "there is no dtype 'f4'"),
    (set_to(*DESCRIPTION, "parameters", 0, "shape", ["m", 4]), "size 'm' is not among the named"),
    (set_to(*DESCRIPTION, "parameters", 0, "shape", [-1]), "-1 is not a size"),
    (set_to(*DESCRIPTION, "parameters", 0, "shape", ["__import__('os')"]), "cannot be part of a"),
    (set_to(*DESCRIPTION, "parameters", 0, "shape", ["n" * 5000]), "a size of 5000 characters"),
    (set_to(*DESCRIPTION, "parameters", 0, "shape", ["(" * 900]), "is not a size"),
    (set_to("sizes", 0, "multiple_of", 0), "the limits of the size 'n' leave nothing"),
    (set_to("sizes", 0, "name", "not"), "'not' cannot be the name of a size"),
    (set_to("weights", 0, "same_as", "none"), "tied to 'none', which is none"),
    (set_to("weights", 0, "shape", [7, 4]), r"'fc.weight': expected float32\[7, 4\], got"),
    (set_to("weights", 0, "name", "fc.w"), "takes the weight 'fc.weight', which there is not"),
    (set_to("library", "name", "../library.so"), "cannot be the name of a file"),
    (set_to("library", "sha256", "0" * 64), "library.so is not what was saved"),
    (set_to("tvm", "0.26.1"), r"compiled by TVM 0\.26\.1, and TVM 0.* is installed.*0\.26\.\*"),
    (set_to("target", {"kind": "cuda"}), "compiled for cuda, and not for cpu.*device='cuda'"),
    (set_to("target", {"kind": "llvm", "mtriple": "riscv64-linux-gnu"}), "compiled for riscv64"),
    (set_to("cpu_features", ["avx9000"]), "with avx9000, which this one has not"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS, ids=[message for _, message in EDITS])
def test_an_edited_manifest(mlp, edit, message):
    path = mlp / "manifest.json"
    text = json.loads(path.read_text())
    edit(text)
    path.write_text(json.dumps(text))
    with pytest.raises((ArtifactError, WeightError), match=message):
        deploy.load(mlp)


def test_manifests_that_are_no_objects(mlp):
    for text in ("", "[]", "3", "null", "{", "[" * 100_000, '{"a": 1, "a": 2}', "\udcff"):
        (mlp / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(ArtifactError, match=r"manifest\.json"):
            deploy.load(mlp)


def test_a_folder_that_is_none(tmp_path):
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(ArtifactError, match=r"is no artifact: there is no manifest\.json"):
            deploy.load(place)


def test_a_read_only_folder_is_enough(mlp):
    for path in mlp.iterdir():
        path.chmod(0o444)
    mlp.chmod(0o555)
    before = {p.name: p.stat().st_mtime_ns for p in mlp.iterdir()}
    try:
        works(mlp)
        assert before == {p.name: p.stat().st_mtime_ns for p in mlp.iterdir()}
    finally:
        mlp.chmod(0o755)


def test_an_artifact_is_replaced(mlp, made, monkeypatch):
    other = {name: value * 2 for name, value in cases.WEIGHTS.items()}
    running = deploy.load(mlp)
    for exchange in (folders._exchanged, lambda a, b: False):
        monkeypatch.setattr(folders, "_exchanged", exchange)
        cases.saved(mlp, made, other)
        works(mlp, other)
        cases.saved(mlp, made)
        works(mlp)
        assert os.listdir(mlp.parent) == ["a"]
    x = np.ones((1, 4), np.float32)
    np.testing.assert_allclose(running.decode(x), cases.expected(x), rtol=1e-5)


def test_nothing_but_artifacts_is_replaced(made, tmp_path):
    place = tmp_path / "mine"
    place.mkdir()
    cases.saved(place, made)  # empty
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"holds other files.*notes\.txt"):
        cases.saved(place, made)
    (place / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is not empty, and is no artifact"):
        cases.saved(place, made)
    with pytest.raises(ArtifactError, match="is a file"):
        cases.saved(place / "notes.txt", made)
    assert sorted(p.name for p in place.iterdir())[2] == "notes.txt"
    assert os.listdir(tmp_path) == ["mine"]


def test_a_failure_leaves_nothing(made, tmp_path, mlp):
    def failing():
        yield "fc.weight", cases.WEIGHTS["fc.weight"]
        raise KeyboardInterrupt

    for place in (tmp_path / "new", mlp):
        with pytest.raises(KeyboardInterrupt):
            deploy.save(place, made[0], failing(), made[1])
    assert os.listdir(tmp_path) == ["a"]
    works(mlp)


def test_wrong_weights_are_not_saved(made, tmp_path):
    bad = {"fc.weight": np.zeros((4, 6), "f4"), "bias": np.zeros(6, "f4")}
    with pytest.raises(WeightError) as caught:
        deploy.save(tmp_path / "a", made[0], bad, made[1])
    text = str(caught.value)
    for part in ("missing: fc.bias", "unexpected: bias", "expected float32[6, 4], got float32[4,"):
        assert part in text
    for pairs in (
        [("fc.weight", bad["fc.weight"])],
        [("fc.weight", cases.WEIGHTS["fc.weight"])],
        [("fc.weight", cases.WEIGHTS["fc.weight"])] * 2,
        [*cases.WEIGHTS.items(), ("more", np.zeros(1))],
    ):
        with pytest.raises(WeightError, match=r"fc\.weight|fc\.bias|more"):
            deploy.save(tmp_path / "a", made[0], iter(pairs), made[1])
    assert not os.listdir(tmp_path)


def test_weights_may_be_of_any_library_in_any_order(made, tmp_path):
    strided = torch.from_numpy(np.ascontiguousarray(cases.WEIGHTS["fc.weight"].T)).T
    pairs = iter([("fc.bias", torch.nn.Parameter(torch.from_numpy(cases.WEIGHTS["fc.bias"])))])
    pairs = [*pairs, ("fc.weight", strided)]
    deploy.save(tmp_path / "a", made[0], iter(pairs), made[1])
    works(tmp_path / "a")


TENSORS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "odd": np.arange(7, dtype=np.int8),
    "none": np.zeros((0, 3), np.float64),
    "number": np.array(3.5, np.float64),
    "truth": np.array([True, False, True]),
    "aligned é": np.arange(64, dtype=np.float16),
}


def test_the_library_of_the_format_reads_what_is_written(tmp_path):
    path = tmp_path / "w.safetensors"
    half = torch.arange(5, dtype=torch.bfloat16)
    entries = [Entry(n, v.shape, str(v.dtype)) for n, v in TENSORS.items()]
    write(
        path,
        [*entries, Entry("half", (5,), "bfloat16")],
        [
            ("half", half.view(torch.uint8).numpy()),
            *((n, v.reshape(-1).view(np.uint8)) for n, v in TENSORS.items()),
        ],
    )
    found = safetensors.torch.load_file(path)
    assert torch.equal(found.pop("half"), half)
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(found[name].numpy(), value)
    file = WeightFile(path)
    assert file.entries["aligned é"].begin % 64 == 0
    assert all(e.begin % 8 == 0 for e in file.entries.values() if e.dtype == "float64")


def test_what_the_library_of_the_format_writes_is_read(made, tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(
        {n: torch.from_numpy(v) for n, v in TENSORS.items()} | {"b": torch.ones(3).bfloat16()},
        path,
        metadata={"format": "pt"},
    )
    file = WeightFile(path)
    assert file.entries.keys() == {*TENSORS, "b"}
    assert file.entries["b"].dtype == "bfloat16"
    for name, value in TENSORS.items():
        entry = file.entries[name]
        assert (entry.shape, entry.dtype) == (value.shape, str(value.dtype))
        assert file.bits(name).tobytes() == value.tobytes()


def test_a_weight_file_cut_off_anywhere_or_wrong(tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file(TENSORS, path)
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(ArtifactError, match=r"w\.safetensors is no safetensors file, or not"):
            WeightFile(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(ArtifactError, match="by its header"):
        WeightFile(path)
    for header, message in (
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "has 4 bytes, and a shape"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "does not begin where"),
        ({"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, "dtype 'C64', which TVM"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "dtype .*which TVM"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "a place that is none"),
        ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "is not described"),
        ({"a": 3}, "is not described"),
        ([], "its header is no object"),
    ):
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        with pytest.raises(ArtifactError, match=message):
            WeightFile(path)


def test_weights_are_written_one_at_a_time(tmp_path):
    """No more is held than a tensor: what was given is let go of before the next is asked for."""
    import tracemalloc

    count, size = 24, 1 << 20
    entries = [Entry(f"w{n}", (size,), "uint8") for n in range(count)]
    made = ((f"w{n}", np.full(size, n, np.uint8)) for n in range(count))
    tracemalloc.start()
    write(tmp_path / "w.safetensors", entries, made)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * size
    file = WeightFile(tmp_path / "w.safetensors")
    assert all((file.bits(f"w{n}") == n).all() for n in range(count))
