"""The processor and the GPU, as PyTorch and TVM see them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from fx2relax.doctor.findings import Finding
from fx2relax.doctor.running import Probed
from fx2relax.installed import wanted
from fx2relax.runtime.compilers import find_compiler
from fx2relax.switches import CUDA, cuda_asked_for

_TELLING = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512vnni", "avx512bf16", "amx-tile")
_TELLING_ARM = ("neon", "sve", "sve2", "bf16", "dotprod", "i8mm")


def check_processor(probed: Probed) -> list[Finding]:
    """LLVM's target, threads, and the libraries of PyTorch's."""
    return [_llvm(probed), *_threads(probed), *_libraries(probed)]


def _llvm(probed: Probed) -> Finding:
    facts, features = probed.get("tvm"), probed.get("package").get("features", [])
    if not facts:
        return Finding.skipped("LLVM", "not tried without tvm")
    if not facts["llvm"]:
        mend = f"pip install --force-reinstall {wanted('apache-tvm')}"
        return Finding.broken("LLVM", "this TVM is built without it", mend)
    telling = [f for f in (*_TELLING, *_TELLING_ARM) if f in features]
    text = f"{facts['llvm']}, {facts['triple']}, {facts['cpu']}: {', '.join(telling)}"
    known = {name: facts[name] for name in ("llvm", "triple", "cpu")}
    return Finding.ok("LLVM", text, features=features, **known)


def _threads(probed: Probed) -> list[Finding]:
    facts = probed.get("torch")
    if not facts:
        return [Finding.skipped("threads", "not tried without torch")]
    threads, cores = facts["threads"], _cores()
    text = f"PyTorch computes with {threads}; {cores} cores"
    said = {"threads": threads, "cores": cores}
    found = []
    if threads > cores:
        found.append(Finding.warning("threads", text, f"export OMP_NUM_THREADS={cores}", **said))
    else:
        found.append(Finding.ok("threads", text, **said))
    shared = probed.get("threads").get("shared")
    if shared is not None:
        pool = "PyTorch's OpenMP threads" if shared else "TVM's own thread pool"
        found.append(Finding.ok("generated kernels", f"run on {pool}", shared=shared))
    return found


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _libraries(probed: Probed) -> list[Finding]:
    facts = probed.get("torch")
    if not facts:
        return []
    has = {"OpenMP": facts["openmp"], "oneDNN": facts["mkldnn"], "MKL": facts["mkl"]}
    text = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in has.items())
    arm = platform.machine() not in ("x86_64", "AMD64")
    name = "PyTorch's libraries"
    text = f"{text}; {facts['capability']}"
    said = {**has, "capability": facts["capability"], "parallel": facts["parallel"]}
    if has["oneDNN"] and (has["MKL"] or arm):
        return [Finding.ok(name, text, **said)]
    mend = f"pip install --force-reinstall {wanted('torch')}"
    return [Finding.warning(name, f"{text}: products and convolutions are slow", mend, **said)]


def check_gpu(probed: Probed) -> list[Finding]:
    """GPUs of NVIDIA's, and what compiles for them."""
    facts = probed.get("torch")
    there = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
    if not facts:
        return [Finding.skipped("GPU", "not tried without torch")]
    if not there and not facts["gpus"]:
        return [Finding.ok("GPU", "none; code is generated for the processor", gpus=[])]
    nvcc = find_compiler("cuda")
    found = [_gpus(facts), _asked_for(), _nvrtc(facts, nvcc), _runtime(facts)]
    if nvcc is None and facts["nvrtc"] is None:
        text = "is not there, nor is NVRTC: nothing can be exported for CUDA"
        found.append(Finding.warning("nvcc", text, "pip install nvidia-cuda-nvrtc"))
    else:
        found.append(Finding.ok("nvcc", nvcc[0] if nvcc else "is not there", path=nvcc))
    return found


def _asked_for() -> Finding:
    if cuda_asked_for():
        text = "kernels are compiled for the GPU; few of their tests have run on one"
        return Finding.ok(CUDA, text, on=True)
    text = f"is not set: graphs on the GPU run in PyTorch; export {CUDA}=1 compiles them"
    return Finding.ok(CUDA, text, on=False)


def _nvrtc(facts: dict[str, Any], nvcc: Any) -> Finding:
    """NVRTC, which TVM reaches by the package cuda-bindings."""
    path, bound = facts["nvrtc"], facts.get("bindings", False)
    said = {"path": path, "bindings": bound}
    if not cuda_asked_for() or (path and bound):
        return Finding.ok("NVRTC", path or "is not there", **said)
    text = f"{path}, without the package cuda-bindings" if path else "is not there"
    if nvcc is not None:
        mend = "export TVM_CUDA_COMPILE_MODE=nvcc"
    else:
        mend = "pip install 'fx2relax[cuda]'" if path else "pip install nvidia-cuda-nvrtc"
    return Finding.warning("NVRTC", f"{text}: no kernel is compiled", mend, **said)


def _runtime(facts: dict[str, Any]) -> Finding:
    path = facts["cudart"]
    if not cuda_asked_for() or (path and ".so.13" in path):
        return Finding.ok("CUDA runtime", path or "is not there", path=path)
    text = f"{path or 'is not there'}: TVM's wheel needs libcudart.so.13"
    return Finding.warning("CUDA runtime", text, "pip install 'nvidia-cuda-runtime>=13'", path=path)


def _gpus(facts: dict[str, Any]) -> Finding:
    if facts["gpus"]:
        driver = facts.get("driver", 0)
        text = f"{', '.join(facts['gpus'])}; driver for CUDA {driver // 1000}.{driver % 1000 // 10}"
        return Finding.ok("GPU", f"{text}, PyTorch's {facts['cuda_build']}", gpus=facts["gpus"])
    if facts["cuda_build"] is None:
        text = "there is a driver, and this PyTorch is built for processors alone"
        return Finding.warning("GPU", text, f"pip install --force-reinstall {wanted('torch')}")
    text = f"there is a driver, and PyTorch (CUDA {facts['cuda_build']}) finds no GPU"
    why = facts.get("gpu_error")
    return Finding.warning("GPU", f"{text}: {why}" if why else text, "nvidia-smi")
