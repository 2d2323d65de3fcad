"""C++ and CUDA source of kernels: compiled once, kept, and refused with reasons."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from extern_sources import HEAD, ONE, small

from fx2relax import BuildFailure, extern
from fx2relax.runtime import toolchain


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/fx2relax/native"


def bare(answer="1", **kwargs):
    """A source that compiles at once: what the macro makes, written out."""
    code = f'extern "C" int __tvm_ffi_kept(void*, const void*, int, void*) {{ return {answer}; }}\n'
    return extern.source(code, functions={"kept": ONE}, **kwargs)


def test_source_is_compiled_once_and_kept(cache, monkeypatch):
    made = bare().file.data
    assert len(list(cache.glob("kernel-*.o"))) == 1
    monkeypatch.setattr(toolchain, "_compile", lambda *a: pytest.fail("compiled again"))
    assert bare().file.data == made


def test_other_source_and_other_flags_are_other_objects(cache):
    for source in (bare("1"), bare("2"), bare("2", flags=["-DUNUSED"])):
        source.build()
    assert len(list(cache.glob("kernel-*.o"))) == 3


def test_a_changed_header_is_seen(cache, tmp_path):
    (tmp_path / "answer.h").write_text("#define ANSWER 1\n")
    path = tmp_path / "mine.cpp"
    path.write_text(
        '#include "answer.h"\n'
        'extern "C" int __tvm_ffi_kept(void*, const void*, int, void*) { return ANSWER; }\n'
    )
    first = extern.source(path, functions={"kept": ONE}).file.data
    assert extern.source(path, functions={"kept": ONE}).file.data == first
    (tmp_path / "answer.h").write_text("#define ANSWER 2\n")
    assert extern.source(path, functions={"kept": ONE}).file.data != first


@pytest.mark.parametrize("damage", [b"", None])
def test_a_damaged_object_is_compiled_anew(cache, damage):
    bare().build()
    (kept,) = cache.glob("kernel-*.o")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert bare().file.data == whole
    assert kept.read_bytes() == whole


def test_source_that_does_not_compile():
    wrong = extern.source("int main( {", functions={"x": ONE}, name="wrong.cpp")
    with pytest.raises(BuildFailure, match=r"(?s)wrong.cpp does not compile: .*wrong.cpp:1:"):
        wrong.build()


def test_a_symbol_that_no_object_defines():
    missing = small("f", "nowhere();", "void nowhere();\n", name="f.cpp")
    with pytest.raises(BuildFailure, match=r"(?s)f.cpp cannot be linked: .*nowhere"):
        missing["f"](torch.ones(1))


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(BuildFailure, match="no C\\+\\+ compiler: set \\$CXX"):
        bare().build()


def test_no_nvcc(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for name in ("NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BuildFailure, match="CUDA source needs nvcc"):
        bare(language="cuda").build()


def test_an_unknown_language():
    with pytest.raises(ValueError, match="language='rust'; it takes 'cpp' or 'cuda'"):
        bare(language="rust")


def test_no_functions():
    with pytest.raises(ValueError, match="needs functions"):
        extern.source("", functions={})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_source_runs():
    cuda_source()["twice"](torch.ones(3, device="cuda"))


def cuda_source():
    code = HEAD + (
        "__global__ void run(const float* x, float* y, int64_t n) {\n"
        "  int64_t i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) y[i] = 2 * x[i];\n}\n"
        "static void twice(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {\n"
        "  run<<<(x.numel() + 255) / 256, 256>>>(static_cast<float*>(x.data_ptr()),\n"
        "    static_cast<float*>(y.data_ptr()), x.numel());\n}\n"
        "TVM_FFI_DLL_EXPORT_TYPED_FUNC(twice, twice);\n"
    )
    return extern.source(code, "cuda", functions={"twice": ONE}, name="twice.cu")


def test_cuda_source_is_compiled(caplog):
    try:
        toolchain.compiler_for("cuda")
    except BuildFailure as error:
        pytest.skip(str(error))
    with caplog.at_level(logging.WARNING):
        source = cuda_source().build()
    assert source.file.symbols.functions == {"twice"}
    assert "-lcudart" in source.file.link
    assert Path(toolchain.compiler_for("cuda")[0]).exists()
