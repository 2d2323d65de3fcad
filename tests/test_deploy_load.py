"""Artifacts, loaded: arguments, results, sizes, states, weights, threads, and no PyTorch."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import deploy_cases as cases
import numpy as np
import pytest
import safetensors.numpy
import torch
from deploy_cases import close, values

from fx2relax import deploy
from fx2relax.deploy import (
    ArtifactError,
)
from fx2relax.errors import ArgumentError, WeightError


@pytest.fixture(scope="module")
def made():
    return cases.mlp()


@pytest.fixture(scope="module")
def mlp(made, tmp_path_factory):
    return cases.saved(tmp_path_factory.mktemp("mlp") / "a", made)


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    first = {"total": np.ones(3, np.float32)}
    return cases.saved(tmp_path_factory.mktemp("counter") / "a", cases.counter(), first)


def test_functions_are_called_by_name(mlp):
    artifact = deploy.load(mlp)
    assert list(artifact) == ["prefill", "decode"]
    x = values(5, 4)
    (result,) = artifact["prefill"](x)
    close(result, cases.expected(x))
    close(artifact.decode(x=x[:1]), cases.expected(x[:1]))
    assert "prefill(x: float32[n, 4]) -> (float32[n, 6])" in repr(artifact)
    assert "prefill" in dir(artifact)
    with pytest.raises(KeyError, match="prefill, decode"):
        artifact["forward"]
    with pytest.raises(AttributeError, match="prefill, decode"):
        artifact.forward  # noqa: B018


STRANGE = {
    "strided": lambda x: np.asfortranarray(x),
    "reversed": lambda x: x[::-1].copy()[::-1],
    "misaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32),
    "big-endian": lambda x: x.astype(">f4"),
    "torch": torch.from_numpy,
    "torch, strided": lambda x: torch.from_numpy(np.ascontiguousarray(x.T)).T,
    "torch, a slice": lambda x: torch.from_numpy(np.concatenate([x[:1], x]))[1:],
    "torch, with gradients": lambda x: torch.from_numpy(x.copy()).requires_grad_(),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_arrays_may_lie_anyhow(mlp, kind):
    x = values(3, 4)
    given = STRANGE[kind](x)
    given = given.reshape(3, 4) if kind == "misaligned" else given
    close(deploy.load(mlp).prefill(given)[0], cases.expected(x))


def test_arrays_that_cannot_be_written_to_are_not_copied(mlp):
    x = values(3, 4)
    x.flags.writeable = False
    close(deploy.load(mlp).prefill(x)[0], cases.expected(x))


BAD = [
    (lambda a, x: a.prefill(), "'x' is missing"),
    (lambda a, x: a.prefill(x, x), "takes 1 arguments, and was given 2"),
    (lambda a, x: a.prefill(x, x=x), "'x' twice"),
    (lambda a, x: a.prefill(y=x), "no argument 'y'; it takes x"),
    (lambda a, x: a.prefill(x[:, :3]), r"'x': expected float32\[n, 4\], got float32\[3, 3\]"),
    (lambda a, x: a.prefill(x[0]), r"'x': expected float32\[n, 4\], got float32\[4\]"),
    (lambda a, x: a.prefill(x.astype("f8")), r"expected float32\[n, 4\], got float64\[3, 4\]"),
    (lambda a, x: a.prefill(x.astype("c8")), "'x': TVM has no dtype complex64"),
    (lambda a, x: a.prefill([1.0]), "'x': expected a NumPy array or a tensor.*, got list"),
    (lambda a, x: a.prefill(torch.zeros(2, 4, dtype=torch.complex64)), "'x': .*complex64"),
    (lambda a, x: a.decode(x), r"'x': expected float32\[1, 4\], got float32\[3, 4\]"),
    (lambda a, x: a.prefill(np.zeros((65, 4), "f4")), "'n' is 65, and has to be at least 1 and"),
    (lambda a, x: a.prefill(np.zeros((0, 4), "f4")), "'n' is 0, and has to be at least 1"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_wrong_arguments_are_named(mlp, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(deploy.load(mlp), values(3, 4))


def test_a_size_that_no_tensor_shows(counter):
    artifact = deploy.load(counter)
    close(artifact.line(4, np.float32(3)), [3, 3, 3, 3])
    assert artifact.line(0, np.float32(3)).shape == (0,)
    with pytest.raises(ArgumentError, match="'m' is 3, and has to be a multiple of 2"):
        artifact.line(3, np.float32(3))
    with pytest.raises(ArgumentError, match="'count': expected an int, got float"):
        artifact.line(3.0, np.float32(3))


def test_states_are_kept_and_begin_again(counter):
    artifact, other = deploy.load(counter), deploy.load(counter)
    x = np.ones(3, np.float32)
    close(artifact.step(x), [4, 4, 4])
    close(x, [-1, -1, -1])  # the function writes to its argument
    close(artifact.states["total"], [2, 2, 2])
    close(other.states["total"], [1, 1, 1])
    artifact.reset()
    close(artifact.states["total"], [1, 1, 1])
    artifact.weights.load_state_dict({"total": np.full(3, 7, np.float32)})
    close(artifact.states["total"], [7, 7, 7])
    with pytest.raises(WeightError, match=r"state 'total': expected float32\[3\], got float32\[2"):
        artifact.weights.load_state_dict({"total": np.ones(2, np.float32)})


WRITTEN = {
    "strided": lambda: (lambda a: (a[::2], a[::2]))(np.ones(6, np.float32)),
    "torch": lambda: (lambda t: (t, t))(torch.ones(3)),
    "torch, strided": lambda: (lambda t: (t[::2], t[::2]))(torch.ones(6)),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_an_argument_is_written_wherever_it_lies(counter, kind):
    given, seen = WRITTEN[kind]()
    deploy.load(counter).step(given)
    close(np.asarray(seen), [-1, -1, -1])


def test_an_argument_that_cannot_be_written_to_is_refused(counter):
    x = np.ones(3, np.float32)
    x.flags.writeable = False
    artifact = deploy.load(counter)
    with pytest.raises(ArgumentError, match="writes to it"):
        artifact.step(x)
    close(artifact.states["total"], [1, 1, 1])


@pytest.mark.parametrize("out", ["numpy", "tvm", "torch"])
def test_results_are_what_was_asked_for(mlp, out):
    x = values(1, 4)
    result = deploy.load(mlp, out=out).decode(x)
    kinds = {"numpy": np.ndarray, "torch": torch.Tensor}
    assert isinstance(result, kinds.get(out, object))
    close(np.from_dlpack(result), cases.expected(x))
    with pytest.raises(ArtifactError, match="numpy, tvm, torch"):
        deploy.load(mlp, out="jax")


def test_results_are_the_callers_own(mlp):
    artifact = deploy.load(mlp)
    x = values(1, 4)
    first = artifact.decode(x)
    first[:] = 9
    close(artifact.decode(x), cases.expected(x))
    close(first, np.full((1, 6), 9))


def test_threads_may_call_at_once(mlp, counter):
    artifact, states = deploy.load(mlp), deploy.load(counter)
    inputs = [values(n, 4) for n in range(1, 17)]
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        for _ in range(20):
            for x in inputs:
                close(artifact.prefill(x)[0], cases.expected(x))
            states.step(np.ones(3, np.float32))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    close(states.states["total"], [161, 161, 161])  # no step was lost


def test_artifacts_may_be_loaded_at_once(mlp):
    x = values(2, 4)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: deploy.load(mlp).prefill(x)[0], range(8)):
            close(result, cases.expected(x))


def test_weights_are_replaced_by_name(mlp):
    artifact = deploy.load(mlp)
    x = values(3, 4)
    close(artifact.prefill(x)[0], cases.expected(x))
    close(artifact.weights["fc.weight"], cases.WEIGHTS["fc.weight"])
    assert not artifact.weights["fc.weight"].flags.writeable
    other = {"fc.weight": values(6, 4), "fc.bias": values(6)}
    assert artifact.weights.load_state_dict(other) == ([], [])
    close(artifact.prefill(x)[0], cases.expected(x, other))
    close(artifact.decode(x[:1]), cases.expected(x[:1], other))
    found = artifact.weights.load_state_dict({"fc.bias": torch.zeros(6), "more": x}, strict=False)
    assert found == (["fc.weight"], ["more"])
    close(artifact.prefill(x)[0], cases.expected(x, {**other, "fc.bias": np.zeros(6)}))


def test_every_wrong_weight_is_named(mlp):
    artifact = deploy.load(mlp)
    bad = {"fc.weight": np.zeros((4, 6), "f4"), "fc.bias": np.zeros(6, "f8"), "more": np.zeros(1)}
    with pytest.raises(WeightError) as caught:
        artifact.weights.load_state_dict(bad)
    text = str(caught.value)
    assert "'fc.weight': expected float32[6, 4], got float32[4, 6]" in text
    assert "'fc.bias': expected float32[6], got float64[6]" in text
    assert "unexpected: 'more'" in text
    with pytest.raises(WeightError, match=r"missing: 'fc\.weight'"):
        artifact.weights.load_state_dict({"fc.bias": np.zeros(6, "f4")})
    close(artifact.decode(np.ones((1, 4), "f4")), cases.expected(np.ones((1, 4), "f4")))


def test_an_artifact_without_weights_is_given_them(made, tmp_path):
    deploy.save(tmp_path / "a", made[0], None, made[1])
    x = values(2, 4)
    artifact = deploy.load(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"without weights.*'fc\.weight', 'fc\.bias'"):
        artifact.prefill(x)
    artifact.weights.load_state_dict(cases.WEIGHTS)
    close(artifact.prefill(x)[0], cases.expected(x))
    close(deploy.load(tmp_path / "a", weights=cases.WEIGHTS).prefill(x)[0], cases.expected(x))
    safetensors.numpy.save_file(cases.WEIGHTS, tmp_path / "w.safetensors")
    close(
        deploy.load(tmp_path / "a", weights=tmp_path / "w.safetensors").prefill(x)[0],
        cases.expected(x),
    )


WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "sympy", "filelock"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import fx2relax
import numpy as np
artifact = fx2relax.load(sys.argv[1])
x = np.load(sys.argv[2])
np.save(sys.argv[3], artifact.prefill(x)[0])
assert "torch" not in sys.modules
assert "tvm" not in sys.modules, "TVM's compiler is slow to load"
import tvm
assert (artifact.prefill(x)[0] == np.load(sys.argv[3])).all()
assert (fx2relax.load(sys.argv[1]).prefill(x)[0] == np.load(sys.argv[3])).all()
"""


def test_no_torch_is_needed(mlp, tmp_path):
    x = values(3, 4)
    np.save(tmp_path / "x.npy", x)
    places = [str(mlp), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *places], check=True)
    close(np.load(tmp_path / "y.npy"), cases.expected(x))
