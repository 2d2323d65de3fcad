"""Artifacts of other machines and of C++: object files, their linking, and the example program."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import deploy_cases as cases
import numpy as np
import pytest
import torch

from fx2relax import deploy, pipeline
from fx2relax.deploy import ArtifactError, Objects, fits
from fx2relax.pipeline import shared
from fx2relax.pipeline.target import described

ROOT = Path(__file__).parent.parent
ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}
FOREIGN = {"kind": "llvm", "mtriple": "riscv64-linux-gnu"}


def lowered(target):
    made = cases.Builder()
    rows = [("fc.weight", (6, 4), "float32"), ("fc.bias", (6,), "float32")]
    made.add("prefill", [("x", ("n", 4), "float32")], rows, cases.linear)
    return pipeline.lower(made.builder.get(), target=target, library="none", lift_weights=True)


@pytest.fixture(scope="module")
def made():
    return cases.mlp()


@pytest.mark.skipif(platform.machine() == "aarch64", reason="it is not another processor here")
def test_code_of_another_processor(made, tmp_path, monkeypatch):
    monkeypatch.setattr(shared.shutil, "which", lambda name: None)
    code = pipeline.portable_code(lowered(ARM), target=ARM)
    assert isinstance(code, pipeline.Unlinked)
    assert code.link == ("aarch64-linux-gnu-gcc", "-shared", "-fPIC")
    for part in code.objects:
        assert part[:4] == b"\x7fELF"
        assert int.from_bytes(part[18:20], "little") == 183  # AArch64
    manifest = dataclasses.replace(made[1], target=described(ARM)[0], cpu_features=())
    objects = Objects(code.objects, code.link)
    written = deploy.save(tmp_path / "a", objects, cases.WEIGHTS, manifest)
    assert written.library is None
    assert [f.name for f in written.objects] == [f"kernels{n}.o" for n in range(len(code.objects))]
    with pytest.raises(ArtifactError) as caught:
        deploy.load(tmp_path / "a")
    assert "object files that have to be linked first" in str(caught.value)
    assert "aarch64-linux-gnu-gcc -shared -fPIC -o library.so kernels0.o" in str(caught.value)


def test_a_linker_of_the_target_is_used(monkeypatch):
    import tvm

    found = {"riscv64-linux-gnu-clang", "clang"}
    monkeypatch.setattr(shared.shutil, "which", lambda name: name if name in found else None)
    target = tvm.target.Target(FOREIGN)
    assert shared.target_linker(target) == (("riscv64-linux-gnu-clang", "-shared", "-fPIC"), True)
    found.remove("riscv64-linux-gnu-clang")
    assert shared.target_linker(target) == (("riscv64-linux-gnu-gcc", "-shared", "-fPIC"), False)
    found.add("ld.lld")
    command = ("clang", "--target=riscv64-linux-gnu", "-fuse-ld=lld", "-shared", "-fPIC")
    assert shared.target_linker(target) == (command, True)


@pytest.fixture
def objects(tmp_path):
    """An artifact of object files, of this processor."""
    target = {"kind": "llvm"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "target_linker", lambda _: (("gcc", "-shared", "-fPIC"), False))
        code = pipeline.portable_code(lowered(target), target=target)
    assert isinstance(code, pipeline.Unlinked)
    _, manifest = cases.mlp()
    manifest = dataclasses.replace(manifest, functions=manifest.functions[:1])
    deploy.save(tmp_path / "a", Objects(code.objects, code.link), cases.WEIGHTS, manifest)
    return tmp_path / "a"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_object_files_are_linked_later(objects):
    with pytest.raises(ArtifactError, match="no linker 'no-such-linker' here"):
        deploy.link(objects, ["no-such-linker"])
    with pytest.raises(ArtifactError, match="gcc cannot link it"):
        deploy.link(objects, ["gcc", "-shared", "-no-such-flag"])
    before = sorted(p.name for p in objects.iterdir())
    assert "library.so" not in before
    assert deploy.link(objects).library is not None
    assert sorted([*before, "library.so"]) == sorted(p.name for p in objects.iterdir())
    x = np.ones((3, 4), np.float32)
    np.testing.assert_allclose(deploy.load(objects).prefill(x)[0], cases.expected(x), rtol=1e-5)
    assert deploy.link(objects) == deploy.load(objects).manifest  # done already


def test_a_damaged_object_file_is_not_linked(objects):
    path = objects / "kernels0.o"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"kernels0\.o has \d+ bytes"):
        deploy.link(objects)
    assert not (objects / "library.so").exists()


def test_what_a_library_needs_of_others_is_named(tmp_path):
    """A library that calls PyTorch cannot run without it; the message has the function's name."""
    from tvm import relax

    made = cases.Builder()

    def body(builder, x):
        kind = relax.TensorType((3,), "float32")
        return [builder.emit(relax.call_dps_packed("no.such.function", relax.Tuple([x]), kind))]

    made.add("step", [("x", (3,), "float32")], [], body)
    _, manifest = cases.mlp()
    manifest = dataclasses.replace(manifest, functions=(), weights=())
    deploy.save(tmp_path / "a", made.code(lift=False), {}, manifest)
    with pytest.raises(ArtifactError, match=r"cannot be run here: .*no\.such\.function"):
        deploy.load(tmp_path / "a")


def test_a_target_as_it_is_named():
    import json

    import tvm

    here, features = described(None)
    assert here["mtriple"] == tvm.target.codegen.llvm_get_system_triple()
    assert here["kind"] == "llvm"
    assert features == tuple(sorted(features))
    assert described(ARM)[0]["mtriple"] == ARM["mtriple"]
    assert described(ARM)[1] == ()
    v4 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4"}
    assert {"avx2", "fma", "avx512f"} <= set(described(v4)[1])
    both = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host={"kind": "llvm"})
    assert described(both)[0]["host"]["kind"] == "llvm"
    assert json.loads(json.dumps(described(both))) == [described(both)[0], []]


def test_instructions_that_the_processor_lacks(made, tmp_path, monkeypatch):
    manifest = dataclasses.replace(made[1], cpu_features=("avx512f", "sse4.1", "fma"))
    deploy.save(tmp_path / "a", made[0], cases.WEIGHTS, manifest)
    monkeypatch.setattr(fits, "_cpu_features", lambda: {"avx2", "fma"})
    with pytest.raises(ArtifactError, match="with avx512f, which this one has not"):
        deploy.load(tmp_path / "a")
    monkeypatch.setattr(fits, "_cpu_features", lambda: {"avx512f", "fma"})
    deploy.load(tmp_path / "a")
    monkeypatch.setattr(fits, "_cpu_features", set)  # nothing is known
    deploy.load(tmp_path / "a")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")
def test_code_for_a_gpu(made, tmp_path, monkeypatch):
    """It is generated without one; a process that has none says so."""
    target = {"kind": "cuda", "arch": "sm_90"}
    code = pipeline.portable_code(lowered(target), target=target)
    assert isinstance(code, bytes)
    assert b"fused_matmul" in code
    functions = made[1].functions[:1]
    manifest = dataclasses.replace(made[1], target=target, functions=functions)
    deploy.save(tmp_path / "a", code, cases.WEIGHTS, manifest)
    with pytest.raises(ArtifactError, match="compiled for cuda, and not for cpu"):
        deploy.load(tmp_path / "a")
    if torch.cuda.is_available():
        x = np.ones((3, 4), np.float32)
        found = deploy.load(tmp_path / "a", "cuda").prefill(x)[0]
        np.testing.assert_allclose(found, cases.expected(x), rtol=1e-4)
    else:
        with pytest.raises(ArtifactError, match="cuda"):
            deploy.load(tmp_path / "a", "cuda")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The C++ example, built by the command in its header."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("g++") is None or shutil.which("tvm-ffi-config", path=path) is None:
        pytest.skip("needs g++ and tvm-ffi-config")
    folder = tmp_path_factory.mktemp("cpp")
    source = shutil.copy(ROOT / "examples" / "cpp" / "run.cpp", folder)
    lines = Path(source).read_text().splitlines()
    (command,) = (line.removeprefix("//").strip() for line in lines if " g++ " in line)
    subprocess.run(command, shell=True, cwd=folder, check=True, env={**os.environ, "PATH": path})
    return folder / "run"


def fill(*shape):
    """What the program calls a function with."""
    count = int(np.prod(shape))
    return ((np.arange(count) % 7 - 3) / 4).astype(np.float32).reshape(shape)


def printed(program, *words):
    done = subprocess.run(
        [program, *map(str, words)], check=True, capture_output=True, text=True, timeout=60
    )
    found = []
    for line in done.stdout.splitlines():
        shape, _, numbers = line.partition("]")
        sizes = [int(n) for n in shape[1:].split(",") if n]
        found.append(np.array(numbers.split(), np.float32).reshape(sizes))
    return found


def test_the_example_prints_the_same_numbers(program, made, tmp_path):
    cases.saved(tmp_path / "mlp", made)
    artifact = deploy.load(tmp_path / "mlp")
    (found,) = printed(program, tmp_path / "mlp", "prefill", "n=5")
    np.testing.assert_array_equal(found, artifact.prefill(fill(5, 4))[0])
    (found,) = printed(program, tmp_path / "mlp", "decode")
    np.testing.assert_array_equal(found, artifact.decode(fill(1, 4)))


def test_the_example_with_states_and_sizes(program, tmp_path):
    first = {"total": np.arange(3, dtype=np.float32)}
    cases.saved(tmp_path / "a", cases.counter(), first)
    artifact = deploy.load(tmp_path / "a")
    x = fill(3)
    wanted = [artifact.step(x), x, artifact.states["total"]]
    for found, value in zip(printed(program, tmp_path / "a", "step"), wanted, strict=True):
        np.testing.assert_array_equal(found, value)
    (found,) = printed(program, tmp_path / "a", "line", "m=4")
    np.testing.assert_array_equal(found, artifact.line(4, fill(1)[0]))


def test_the_example_says_what_is_wrong(program, made, tmp_path):
    cases.saved(tmp_path / "a", made)
    for words, message in (
        (["prefill"], "give the size n="),
        (["other"], "there is no other"),
        ([], "usage"),
    ):
        done = subprocess.run([program, tmp_path / "a", *words], capture_output=True, text=True)
        assert done.returncode
        assert message in done.stderr
