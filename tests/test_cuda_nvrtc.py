"""The source of kernels on its way through NVRTC, as far as it shows without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from cuda_cases import ampere, graph_of, specs_of

from fx2relax import devices, drafts, pipeline
from fx2relax.options import Options
from fx2relax.pipeline import nvrtc, precise

__all__ = ["ampere"]
HOOK = "tvm_callback_cuda_compile"


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _sources(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> list[str]:
    """What a program for a GPU is compiled from."""
    found: list[str] = []
    own = precise.precise
    monkeypatch.setattr(precise, "precise", lambda s: (found.append(own(s)), found[-1])[1])
    graph = graph_of(lambda x: (x.exp() * 2).tanh().sum(-1), (4, 300, dtype))
    draft = drafts.draft_of(graph, specs_of(graph), Options(), False)
    target = devices.facts(draft.device)
    lowered = pipeline.lower(draft.imported.mod, target=target)
    ready, _ = pipeline.give(lowered, draft.imported.name, draft.imported.num_input)
    found.clear()
    pipeline.machine_code(ready, target=target)
    return found


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_source_does_without_cpps_library(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = _sources(monkeypatch, dtype)
    light = nvrtc.light(source)
    assert "cuda/std" in source
    assert "cuda/std" not in light
    assert "#include <cuda.h>" not in light
    assert light.count("#if") == light.count("#endif")
    assert source.endswith(light[-2000:])


def test_a_source_of_another_kind_stays() -> None:
    for source in ("", "int x;", "#include <cuda.h>\n#endif", "#ifdef __CUDACC_RTC__\n#endif"):
        assert nvrtc.light(source) == source


@pytest.mark.usefixtures("ampere")
@pytest.mark.skipif(not _has("cuda.bindings.nvrtc"), reason="needs cuda-bindings and NVRTC")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nvrtc_takes_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = _sources(monkeypatch, dtype)
    assert nvrtc.cubin(source, "sm_90")[:4] == b"\x7fELF"
    with pytest.raises(RuntimeError, match="identifier"):
        nvrtc.cubin(source + "\nint f() { return nobody; }", "sm_90")


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who compiles, of ours and TVM's; neither does any work."""
    asked: list[str] = []
    nvrtc._hook()
    hooked = tvm_ffi.get_global_func(HOOK)
    theirs = lambda source, *rest: asked.append("TVM") or b"theirs"  # noqa: E731
    tvm_ffi.register_global_func(HOOK, theirs, override=True)
    monkeypatch.setattr(nvrtc, "_hooked", [])
    nvrtc._hook()
    yield asked
    tvm_ffi.register_global_func(HOOK, hooked, override=True)


def _compile() -> bytes:
    with tvm.target.Target({"kind": "cuda", "arch": "sm_90"}), nvrtc.compiled_lightly():
        return bytes(tvm_ffi.get_global_func(HOOK)("source"))


def test_ours_is_asked_first(compilers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(source: str, arch: str) -> bytes:
        compilers.append(f"{source} for {arch}")
        return b"ours"

    monkeypatch.setattr(nvrtc, "cubin", ours)
    assert _compile() == b"ours"
    assert bytes(tvm_ffi.get_global_func(HOOK)("source")) == b"theirs"
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")
    assert _compile() == b"theirs"
    assert compilers == ["source for sm_90", "TVM", "TVM"]


def test_where_ours_fails_tvms_is_asked(
    compilers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ours(source: str, arch: str) -> bytes:
        raise RuntimeError("no headers")

    monkeypatch.setattr(nvrtc, "cubin", ours)
    assert _compile() == b"theirs"
    assert compilers == ["TVM"]


def test_what_is_only_written_is_not_compiled(compilers: list[str]) -> None:
    nvrtc.written_only(lambda: tvm_ffi.get_global_func(HOOK)("source"))
    assert compilers == []

    def broken() -> Any:
        raise ValueError("before it is written")

    with pytest.raises(ValueError, match="before"):
        nvrtc.written_only(broken)


def test_folders_of_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "cuda_fp16.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    nvrtc._headers.cache_clear()
    try:
        assert nvrtc._headers() == [str(folder)]
        (folder / "cccl").mkdir()
        nvrtc._headers.cache_clear()
        assert nvrtc._headers() == [str(folder), str(folder / "cccl")]
    finally:
        nvrtc._headers.cache_clear()
