"""`fx2relax doctor` says what is wrong, and ends well, whatever is missing."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from environments import doctor, environment, run, site_packages

from fx2relax import cache, installed
from fx2relax.cli import main
from fx2relax.doctor import examine, machine, running, storage, versions
from fx2relax.doctor.findings import Finding
from fx2relax.doctor.running import Probed, probe
from fx2relax.doctor.switches import KNOWN

TVM = ("tvm", "apache_tvm")
compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache for all, so that the native helper is compiled once."""
    return str(tmp_path_factory.mktemp("kept"))


def _status(found: dict[str, Any], *names: str) -> list[str]:
    each = [found[name] for name in names]
    return [f.status if isinstance(f, Finding) else f["status"] for f in each]


@compiler
def test_all_is_well(kept: str) -> None:
    code, found = doctor(FX2RELAX_CACHE_DIR=kept)
    assert code == 0
    wrong = {name: f for name, f in found.items() if f["status"] not in ("ok", "warning")}
    assert wrong == {}
    good = ("torch", "apache-tvm", "numpy", "C++ compiler", "linker", "native helper", "LLVM")
    assert set(_status(found, *good, "programs", "small model", "stored program")) == {"ok"}
    assert found["programs"]["facts"]["mode"] == "700"
    assert found["FX2RELAX_CACHE_DIR"]["text"] == kept
    # What was tried was not kept.
    assert list((Path(kept) / "programs").glob("*")) == []


def test_without_a_compiler(kept: str, tmp_path: Path) -> None:
    code, found = doctor(FX2RELAX_CACHE_DIR=str(tmp_path), PATH=str(tmp_path))
    assert code == 0
    missing = ("C++ compiler", "C compiler", "linker", "native helper", "stored program")
    assert set(_status(found, *missing)) == {"warning"}
    assert _status(found, "small model") == ["ok"]
    assert "install" in found["linker"]["mend"]


def test_a_compiler_that_is_not_there_or_does_not_run(monkeypatch, tmp_path) -> None:
    from fx2relax.doctor import tools

    monkeypatch.setenv("CC", "no-such-cc")
    finding = tools._tool("c")
    assert (finding.status, finding.mend) == (("warning", "unset CC") if shutil.which("cc") else
                                              ("warning", tools.install_compiler()))  # fmt: skip
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert "does not run" in tools._tool("c").text


def test_without_tvm(kept: str, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", without=TVM)
    code, found = doctor(python=python, FX2RELAX_CACHE_DIR=kept)
    assert code == 1
    assert found["apache-tvm"]["status"] == "broken"
    assert found["apache-tvm"]["mend"] == "pip install 'apache-tvm>=0.27,<0.28'"
    assert _status(found, "torch", "numpy") == ["ok", "ok"]
    assert _status(found, "LLVM", "native helper", "small model", "stored program") == (
        ["skipped"] * 4
    )


def test_without_torch(kept: str, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", without=("torch", "functorch"))
    code, found = doctor(python=python, FX2RELAX_CACHE_DIR=kept)
    assert code == 1
    assert found["torch"]["mend"] == "pip install 'torch>=2.11,<2.16'"
    assert found["torch"]["text"] == "is not installed"
    assert _status(found, "apache-tvm", "LLVM") == ["ok", "ok"]
    assert _status(found, "threads", "GPU", "small model") == ["skipped"] * 3
    plain = run("doctor", python=python, FX2RELAX_CACHE_DIR=kept)
    assert plain.returncode == 1
    assert "$ pip install 'torch>=2.11,<2.16'" in plain.stdout
    for command in (["ops"], ["demo"], ["bench", "x.py:f"]):
        done = run(*command, python=python)
        assert done.returncode == 1
        assert "fx2relax doctor" in done.stderr
        assert "Traceback" not in done.stderr
    for command in (["cache", "list"], ["cache", "size"], ["--help"], ["bench", "--help"]):
        assert run(*command, python=python, FX2RELAX_CACHE_DIR=kept).returncode == 0


OTHERS = {
    "an older one": ("0.19.0", "__version__ = '0.19.0'", "0.19.0 is too old"),
    "one that raises": (
        "0.27.0",
        "raise OSError('libtvm.so: undefined symbol: x')",
        "0.27.0 cannot be imported: OSError: libtvm.so: undefined symbol: x",
    ),
    "one that dies": (
        "0.27.0",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "0.27.0 cannot be imported: the process died of SIGSEGV: "
        "Fatal Python error: Segmentation fault",
    ),
    "one that leaves": (
        "0.27.0",
        "import os\nprint('hello')\nos._exit(3)",
        "0.27.0 cannot be imported: the process ended with 3: it said nothing",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_tvm(case: str, kept: str, tmp_path: Path) -> None:
    version, code, expected = OTHERS[case]
    python = environment(tmp_path / "env", without=(*TVM, "torch", "functorch"))
    packages = site_packages(tmp_path / "env")
    (packages / "tvm").mkdir()
    (packages / "tvm" / "__init__.py").write_text(code)
    (packages / f"apache_tvm-{version}.dist-info").mkdir()
    (packages / f"apache_tvm-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: apache-tvm\nVersion: {version}\n"
    )
    returned, found = doctor(python=python, FX2RELAX_CACHE_DIR=kept)
    assert returned == 1
    assert found["apache-tvm"]["status"] == "broken"
    assert found["apache-tvm"]["text"] == expected
    assert "apache-tvm>=0.27,<0.28" in found["apache-tvm"]["mend"]


FOLDERS = {"a file in its place": "file", "where nothing can be made": "proc", "others'": "open"}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_cache_that_cannot_be_used(case: str, tmp_path: Path) -> None:
    where = tmp_path / "cache"
    if FOLDERS[case] == "file":
        where.write_text("")
    elif FOLDERS[case] == "proc":
        where = Path("/proc/cache")
    else:
        (where / "programs").mkdir(parents=True)
        (where / "programs").chmod(0o777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FX2RELAX_CACHE_DIR", str(where))
        patch.setenv("FX2RELAX_CACHE", "1")
        patch.setenv("HOME", str(tmp_path))
        patch.setattr("fx2relax.doctor.probe", lambda step: Probed())
        found = {finding.name: finding for finding in examine()}
        assert found["programs"].status == "warning"
        mend = found["programs"].mend
        if FOLDERS[case] == "open":
            assert mend == f"chmod go-w {where}/programs"
            subprocess.run(mend, shell=True, check=True)
        else:
            assert mend.startswith(f"export FX2RELAX_CACHE_DIR={tmp_path}/fx2relax")
            patch.setenv("FX2RELAX_CACHE_DIR", mend.partition("=")[2])
        # What it says does mend it.
        found = {finding.name: finding for finding in examine()}
        assert _status(found, "programs", "native", "entries") == ["ok"] * 3


def test_a_home_that_cannot_be_written_to(tmp_path: Path) -> None:
    code, found = doctor(HOME="/proc/home", XDG_CACHE_HOME="", PATH=str(tmp_path))
    assert code == 0
    assert _status(found, "programs", "native") == ["warning", "warning"]
    assert "FX2RELAX_CACHE_DIR" in found["programs"]["mend"]
    assert _status(found, "small model") == ["ok"]


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not shutil.which("setpriv"),
    reason="takes root and setpriv",
)
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    where = tmp_path / "home"
    where.mkdir(mode=0o500)
    dropped = "-dac_override,-dac_read_search"
    before = ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}"]
    python = environment(tmp_path / "env", without=("torch", "functorch"))  # which takes time
    code, found = doctor(python=python, before=before, HOME=str(where), XDG_CACHE_HOME="")
    assert code == 1
    assert found["programs"]["status"] == "warning"
    assert "Permission denied" in found["programs"]["text"]


def test_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert storage._temporary().status in ("ok", "warning")
    monkeypatch.setattr(storage.tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/proc/nowhere")
    assert storage._temporary().mend == "unset TMPDIR"
    monkeypatch.setattr(storage.tempfile, "gettempdir", lambda: "/proc/nowhere")
    assert storage._temporary().status == "broken"


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KNOWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("fx2relax.doctor.probe", lambda step: Probed())
    monkeypatch.setenv("FX2RELAX_CAHCE", "0")
    monkeypatch.setenv("FX2RELAX_NATIVE", "no")
    monkeypatch.setenv("FX2RELAX_CACHE_SIZE", "20 MiB")
    found = {f.name: f for f in examine() if f.section == "switches"}
    assert "is FX2RELAX_CACHE meant?" in found["FX2RELAX_CAHCE"].text
    assert found["FX2RELAX_CAHCE"].mend == "unset FX2RELAX_CAHCE"
    assert found["FX2RELAX_NATIVE"].status == "warning"
    assert found["FX2RELAX_CACHE_SIZE"].status == "ok"
    assert cache.size_limit() == 20 << 20


def test_every_switch_is_known() -> None:
    root = Path(versions.__file__).parent.parent
    names = set()
    for path in root.rglob("*.py"):
        for word in path.read_text().split('"'):
            if word.startswith("FX2RELAX_") and word.isupper() and word.isidentifier():
                names.add(word)
    names -= {"FX2RELAX_"}
    assert names == set(KNOWN)


def test_versions_are_those_that_the_package_requires() -> None:
    config = configparser.ConfigParser()
    config.read(Path(__file__).parent.parent / "setup.cfg")
    required = config["options"]["install_requires"].split()
    for name in installed.SUPPORTED:
        assert installed.wanted(name).strip("'") in required


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("torch", "2.10.1+cpu", "old"),
        ("torch", "2.11.0", ""),
        ("torch", "2.15.2+cu130", ""),
        ("torch", "2.16.0a0+git", "new"),
        ("apache-tvm", "0.27.0.post1", ""),
        ("apache-tvm", "0.28.0", "new"),
        ("apache-tvm", "0.9.dev0", "old"),
        ("numpy", "2.4.6", ""),
        ("torch", None, ""),
        ("torch", "unknown", ""),
    ],
)
def test_supported_versions(name: str, version: str | None, expected: str) -> None:
    assert installed.unsupported(name, version) == expected


def test_a_newer_version_that_works_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda name: "2.16.0")
    finding = versions._package("torch", Probed(facts={"torch": {"version": "2.16.0"}}))
    assert (finding.status, finding.mend) == ("warning", "pip install 'torch>=2.11,<2.16'")


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    line = 'print("\\nfx2relax-doctor:{\\"begins\\": \\"tvm\\"}", flush=True)'
    monkeypatch.setattr(running, "_START", f"import time\n{line}\ntime.sleep(100)")
    found = probe(lambda what: None, seconds=3)
    assert found.errors == {"tvm": "nothing was heard for 3 seconds"}


TORCH = {"gpus": [], "cuda_build": "13.0", "nvrtc": None, "cudart": None}
GPUS = {
    "none": (TORCH, False, {"GPU": "ok"}),
    "a build for processors": (TORCH | {"cuda_build": None}, True, {"GPU": "warning"}),
    "a driver that fails": (TORCH | {"gpu_error": "too old"}, True, {"GPU": "warning"}),
    "no compiler": (TORCH | {"gpus": ["H100"]}, True, {"GPU": "ok", "nvcc": "warning"}),
    "all there": (
        TORCH | {"gpus": ["H100"], "driver": 12080, "nvrtc": "/x", "cudart": "/y"},
        True,
        {"GPU": "ok", "NVRTC": "ok", "CUDA runtime": "ok", "nvcc": "ok"},
    ),
}


@pytest.mark.parametrize("case", GPUS)
def test_gpus(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, driver, expected = GPUS[case]
    monkeypatch.setattr(machine.Path, "exists", lambda path: driver)
    monkeypatch.setattr(machine, "find_compiler", lambda language: None)
    found = {f.name: f for f in machine.check_gpu(Probed(facts={"torch": facts}))}
    assert {name: found[name].status for name in expected} == expected
    if facts.get("driver"):
        assert "driver for CUDA 12.8" in found["GPU"].text


HERE = TORCH | {"gpus": ["H100"], "nvrtc": "/x", "cudart": "/y/libcudart.so.13", "bindings": True}
ASKED = {
    "all there": (HERE, None, {}),
    "no NVRTC": (HERE | {"nvrtc": None}, None, {"NVRTC": "pip install nvidia-cuda-nvrtc"}),
    "no bindings": (HERE | {"bindings": False}, None, {"NVRTC": "pip install 'fx2relax[cuda]'"}),
    "nvcc": (
        HERE | {"nvrtc": None},
        ["nvcc"],
        {"NVRTC": "export TVM_CUDA_COMPILE_MODE=nvcc"},
    ),
    "an older runtime": (
        HERE | {"cudart": "/y/libcudart.so.12"},
        None,
        {"CUDA runtime": "pip install 'nvidia-cuda-runtime>=13'"},
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_kernels_for_a_gpu_need(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, nvcc, mends = ASKED[case]
    monkeypatch.setenv("FX2RELAX_CUDA", "1")
    monkeypatch.setattr(machine, "find_compiler", lambda language: nvcc)
    found = {f.name: f for f in machine.check_gpu(Probed(facts={"torch": facts}))}
    needed = {name: found[name].mend for name in ("NVRTC", "CUDA runtime") if found[name].mend}
    assert needed == mends
    assert "few of their tests" in found["FX2RELAX_CUDA"].text
    monkeypatch.delenv("FX2RELAX_CUDA")
    found = {f.name: f for f in machine.check_gpu(Probed(facts={"torch": facts}))}
    assert not found["NVRTC"].mend
    assert "export FX2RELAX_CUDA=1" in found["FX2RELAX_CUDA"].text


def test_a_wrong_model_and_a_check_that_fails_end_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"model": {"right": False, "error": 0.5}, "disk": {"right": True, "hits": 1}}
    monkeypatch.setattr("fx2relax.doctor.probe", lambda step: Probed(facts=facts))
    monkeypatch.setitem(examine.__globals__["_CHECKS"], "GPU", lambda probed: 1 / 0)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "differs from eager by 5.0e-01" in result.output
    assert "this check failed: ZeroDivisionError" in result.output
    assert Finding.ok("x", "y").of("z").section == "z"
