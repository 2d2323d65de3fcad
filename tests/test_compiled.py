"""C and C++ sources compiled once and kept, whatever happens to the compiler or the cache."""

import ctypes
import logging
import os
import subprocess
import sys
import time

import pytest

from fx2relax.runtime import compiled, compilers


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    for function in (compiled._compiler, compiled._warn_missing, compiled._warn_failed):
        function.cache_clear()
    yield
    compiled._compiler.cache_clear()


@pytest.fixture
def source(tmp_path):
    """A function whose answer is in a header."""
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    file = tmp_path / "deep.cpp"
    file.write_text('#include "answer.h"\nextern "C" int thought() { return ANSWER; }\n')
    return file


def load(source, **kwargs):
    return compiled.load("deep", [source], headers=[source.parent / "answer.h"], **kwargs)


def files(tmp_path, suffix=".so"):
    return sorted((tmp_path / "cache/fx2relax/native").glob(f"*{suffix}"))


def test_compiles_once(source, tmp_path, monkeypatch):
    assert load(source).thought() == 42
    assert len(files(tmp_path)) == 1
    monkeypatch.setattr(compiled, "_compile", lambda *a: pytest.fail("compiled again"))
    assert load(source).thought() == 42


def test_a_changed_header_and_other_flags_are_other_libraries(source, tmp_path):
    assert load(source).thought() == 42
    (source.parent / "answer.h").write_text("#ifndef ANSWER\n#define ANSWER 43\n#endif\n")
    assert load(source).thought() == 43
    assert load(source, flags=["-DANSWER=44"]).thought() == 44
    assert len(files(tmp_path)) == 3


def test_other_compilers_and_versions_are_other_keys(source, monkeypatch):
    compiler = compiled._compiler("c++")
    first = compiled._key(compiler, [], [source])
    assert compiled._key((*compiler, "-m64"), [], [source]) != first
    monkeypatch.setattr(compiled.torch, "__version__", "2.99")
    assert compiled._key(compiler, [], [source]) != first


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_a_damaged_file_is_compiled_anew(source, tmp_path, caplog, damage):
    load(source)
    (library,) = files(tmp_path)
    whole = library.read_bytes()
    library.unlink()  # the process that has it loaded keeps its own
    library.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert load(source).thought() == 42
    assert len(library.read_bytes()) == len(whole)
    assert "is compiled anew" in caplog.text


def test_a_file_without_its_digest_is_compiled_anew(source, tmp_path):
    load(source)
    (digest,) = files(tmp_path, ".sha256")
    digest.unlink()
    assert load(source).thought() == 42
    assert digest.exists()


def test_switched_off(source, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert load(source) is None
    assert not (tmp_path / "cache").exists()
    assert not caplog.text


def test_no_compiler_is_one_warning(source, monkeypatch, caplog):
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    assert load(source) is None
    assert compiled.load("other", [source.with_suffix(".c")]) is None
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "gcc" in caplog.text


def test_a_compiler_that_fails_is_one_warning_with_its_message(source, caplog):
    source.write_text("#error wrong")
    assert load(source) is None
    assert load(source) is None
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "#error wrong" in caplog.text


def test_the_user_s_compiler_is_used(source, tmp_path, monkeypatch):
    wrapper = tmp_path / "my compiler"
    wrapper.write_text(f'#!/bin/sh\ntouch "{tmp_path}/used"\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' g++ -DANSWER=7")
    (source.parent / "answer.h").write_text("")
    assert load(source).thought() == 7
    assert (tmp_path / "used").exists()


def test_a_cache_that_cannot_be_written_to(source, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    assert load(source).thought() == 42


def test_processes_at_once_compile_once(source, tmp_path):
    wrapper = tmp_path / "slow"
    wrapper.write_text(f'#!/bin/sh\necho >> "{tmp_path}/count"\nsleep 1\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from fx2relax.runtime import compiled\n"
        "print(compiled.load('deep', [Path(sys.argv[1])]).thought())"
    )
    env = os.environ | {"CXX": str(wrapper)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(source)], env=env, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in started] == ["42\n"] * 3
    assert (tmp_path / "count").read_text().count("\n") == 1


def test_nothing_is_left_by_a_compiler_that_hangs(source, tmp_path, monkeypatch, caplog):
    wrapper = tmp_path / "hangs"
    wrapper.write_text("#!/bin/sh\nexec sleep 60\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setattr(compiled, "_SECONDS", 0.2)
    start = time.monotonic()
    assert load(source) is None
    assert time.monotonic() - start < 30
    assert "timed out" in caplog.text
    assert not files(tmp_path)


def test_threads_are_shared_by_what_is_compiled():
    from fx2relax.pipeline import threads

    library = compiled.load("launch", [threads._SOURCE])
    assert ctypes.cast(library.fx2relax_launch, ctypes.c_void_p).value
