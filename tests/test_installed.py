"""Without PyTorch or TVM, or with others: an error that says what mends it, or one warning."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from environments import environment, site_packages

import fx2relax

TVM = ("tvm", "apache_tvm")
_USES = {
    "torch.compile": """
        import torch
        f = torch.compile(lambda x: (x * 2).relu(), backend="relax")
        x = torch.ones(3)
        assert torch.equal(f(x), x * 2)
        f(x)
        print("went on")""",
    "from_fx": """
        import torch, fx2relax
        fx2relax.from_fx(torch.fx.symbolic_trace(lambda x: x + 1), [torch.ones(3)])""",
    "load": """
        import fx2relax
        fx2relax.load("nowhere")""",
}
_SCRIPT = """
import sys, textwrap
try:
    exec(textwrap.dedent(sys.argv[1]))
except ImportError as error:
    print(type(error).__module__, type(error).__name__)
    print(error)
"""


def use(what: str, python: Path) -> tuple[str, str]:
    """What a use of the package prints in an environment, and what it warns of."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FX2RELAX_")}
    environ |= {"PYTHONPATH": str(Path(fx2relax.__file__).parent.parent), "FX2RELAX_CACHE": "0"}
    done = subprocess.run(
        [str(python), "-c", _SCRIPT, _USES[what]],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def _tvm(where: Path, version: str, code: str) -> Path:
    python = environment(where, without=TVM)
    packages = site_packages(where)
    (packages / "tvm").mkdir()
    (packages / "tvm" / "__init__.py").write_text(code)
    (packages / f"apache_tvm-{version}.dist-info").mkdir()
    (packages / f"apache_tvm-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: apache-tvm\nVersion: {version}\n"
    )
    return python


@pytest.mark.parametrize("what", _USES)
def test_without_tvm(what: str, tmp_path: Path) -> None:
    said, _ = use(what, environment(tmp_path, without=TVM))
    assert said.startswith("fx2relax.errors InstallationError\napache-tvm is not installed\n")
    assert "  pip install 'apache-tvm>=0.27,<0.28'\n" in said
    assert "fx2relax doctor" in said


def test_with_an_older_tvm(tmp_path: Path) -> None:
    python = _tvm(tmp_path, "0.19.0", "__version__ = '0.19.0'")
    said, _ = use("torch.compile", python)
    assert "\napache-tvm 0.19.0 is too old\n  pip install 'apache-tvm>=0.27,<0.28'\n" in said


def test_with_a_compiler_of_tvms_that_does_not_load(tmp_path: Path) -> None:
    python = _tvm(tmp_path, "0.27.0", "raise OSError('libtvm.so: undefined symbol: x')")
    for path in Path(__import__("tvm_ffi").__file__).parent.parent.glob("*tvm_ffi*"):
        (site_packages(tmp_path) / path.name).symlink_to(path)
    said, warned = use("torch.compile", python)
    assert said == "went on\n"
    line = "InstallationError: apache-tvm 0.27.0 cannot be imported: OSError: libtvm.so: undefined"
    assert warned.count(line) == 1
    assert "pip install --force-reinstall 'apache-tvm>=0.27,<0.28'" in warned
    said, _ = use("from_fx", python)
    assert said.startswith("fx2relax.errors InstallationError\napache-tvm 0.27.0 cannot be")


def test_others_and_all() -> None:
    from fx2relax.installed import explained

    other = explained(ModuleNotFoundError("No module named 'rich'", name="rich.table"))
    assert "rich" in str(other)
    assert explained(other) is other
    moved = explained(ImportError("cannot import name 'x' from 'torch'", name="torch"))
    assert str(moved).startswith("what this package is built on cannot be imported: ImportError")
    assert "'torch>=2.11,<2.16' 'apache-tvm>=0.27,<0.28'" in str(moved)
