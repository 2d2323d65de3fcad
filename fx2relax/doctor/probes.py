"""What has to be tried: imports, the native helper, a small model. Run in a process of its own."""

from __future__ import annotations

import contextlib
import glob
import importlib
import importlib.util
import json
import logging
import os
import site
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fx2relax import disk
from fx2relax.doctor.stages import MARK, STAGES

Facts = dict[str, Any]


def main() -> None:
    """Try one stage after the other; what each finds is one line of JSON."""
    functions = {f.__name__.removeprefix("_"): f for f in _PROBES}
    for stage in STAGES:
        _say(begins=stage)
        try:
            _say(stage=stage, facts=functions[stage]())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            text = " ".join(f"{type(error).__name__}: {error}".split())
            _say(stage=stage, kind=type(error).__name__, error=text[:1000])
    _say(ended=True)


def _say(**said: Any) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(said)}\n")
    sys.stdout.flush()


def _numpy() -> Facts:
    return {"version": importlib.import_module("numpy").__version__}


def _torch() -> Facts:
    torch: Any = importlib.import_module("torch")
    facts = {
        "version": torch.__version__,
        "file": torch.__file__,
        "threads": torch.get_num_threads(),
        "openmp": torch.backends.openmp.is_available(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "mkl": torch.backends.mkl.is_available(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "parallel": torch.__config__.parallel_info(),
        "cuda_build": torch.version.cuda,
        "gpus": [],
    }
    try:
        if torch.cuda.is_available():
            names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
            facts["gpus"] = names
            facts["driver"] = torch._C._cuda_getDriverVersion()
    except Exception as error:
        facts["gpu_error"] = f"{type(error).__name__}: {error}"
    for name in ("nvrtc", "cudart"):
        facts[name] = _library(name)
    try:
        facts["bindings"] = importlib.util.find_spec("cuda.bindings") is not None
    except ImportError:
        facts["bindings"] = False
    return facts


def _library(name: str) -> str | None:
    """Where a library of CUDA's is: loaded, known to the system, or in one of its packages."""
    from ctypes.util import find_library

    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            if f"lib{name}" in line:
                return line.split()[-1]
    found = find_library(name)
    if found:
        return found
    for folder in {*sys.path, *site.getsitepackages()}:
        packaged = sorted(glob.glob(f"{glob.escape(folder)}/nvidia/*/lib/lib{name}.so*"))
        if packaged:
            return packaged[0]
    return None


def _tvm() -> Facts:
    tvm: Any = importlib.import_module("tvm")
    ffi: Any = importlib.import_module("tvm_ffi")
    facts = {"version": tvm.__version__, "ffi": ffi.__version__, "file": tvm.__file__}
    llvm = tvm.target.codegen
    facts |= {
        "llvm": llvm.llvm_version_major(allow_none=True),
        "triple": str(llvm.llvm_get_system_triple()),
        "cpu": str(llvm.llvm_get_system_cpu()),
        "cuda": bool(tvm.runtime.enabled("cuda")),
    }
    return facts


def _package() -> Facts:
    """All of this package: a name that TVM or PyTorch has moved is found here."""
    compat: Any = importlib.import_module("fx2relax.compat")
    importlib.import_module("fx2relax.backend")
    said = [feature.partition("=") for feature in compat.cpu_features()[1:]]
    return {"features": [name for name, _, has in said if has == "1" or "true" in has.lower()]}


def _native() -> Facts:
    """The native helper, compiled if it is not there yet."""
    native: Any = importlib.import_module("fx2relax.runtime.native")
    start = time.monotonic()
    with _warnings() as said:
        use = native.use()
    return {"use": use, "seconds": time.monotonic() - start, "warnings": said}


def _threads() -> Facts:
    threads: Any = importlib.import_module("fx2relax.pipeline.threads")
    return {"shared": threads.share_threads()}


def _model() -> Facts:
    """A small model, compiled without the cache, and compared with eager."""
    torch: Any = importlib.import_module("torch")
    start = time.monotonic()
    with _warnings() as said:
        error = _compare({"cache": False, "on_unsupported": "raise"})
    return {
        "error": error,
        "right": error <= 1e-5,
        "seconds": time.monotonic() - start,
        "graphs": importlib.import_module("fx2relax").stats()["graphs"],
        "warnings": said,
        "threads": torch.get_num_threads(),
    }


def _disk() -> Facts:
    """The same, stored in a folder that is gone afterwards, and found there."""
    fx2relax: Any = importlib.import_module("fx2relax")
    with contextlib.ExitStack() as stack:
        try:  # beside the programs that are kept, as these can be loaded from there
            disk.own_folder(disk.native())
            folder = str(stack.enter_context(disk.own_workshop(disk.native())))
        except OSError:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fx2relax-"))
        said = stack.enter_context(_warnings())
        os.environ |= {"FX2RELAX_CACHE_DIR": folder, "FX2RELAX_CACHE": "1"}
        fx2relax.reset_stats()
        errors = [_compare({"on_unsupported": "raise"}) for _ in range(2)]
        hits = fx2relax.stats()["cache_hits"]
    return {"hits": hits, "right": max(errors) <= 1e-5, "warnings": said}


def _compare(options: Facts) -> float:
    """The largest difference of a small compiled model from eager."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).eval()
    x = torch.randn(8, 16)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(model, backend="relax", fullgraph=True, options=options)(x)
        return float((got - model(x)).abs().max())


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What this package warns of meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fx2relax")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


_PROBES: tuple[Callable[[], Facts], ...] = (
    *(_numpy, _torch, _tvm, _package),
    *(_native, _threads, _model, _disk),
)
