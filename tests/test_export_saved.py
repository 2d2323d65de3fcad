"""Exports run from saved folders, in a process that has no PyTorch, as eager does."""

import numpy as np
import pytest
import torch

import fx2relax
from fx2relax import Tensor


def test_a_state_is_kept_and_reset(tmp_path):
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.tensor([1.0, 2.0]))

        def add(self, x):
            self.total += x
            return self.total

        def read(self):
            return {"total": self.total, "twice": self.total * 2, "name": "n"}

    spec = {"add": {"x": Tensor((2,))}, "read": {}}
    fx2relax.export(Counter(), spec).save(tmp_path / "artifact")
    artifact = fx2relax.load(tmp_path / "artifact")
    one = np.ones(2, np.float32)
    first = artifact.add(one)
    assert first.tolist() == [2, 3]
    assert artifact.add(one).tolist() == [3, 4]
    assert first.tolist() == [2, 3]
    read = artifact.read()
    assert read["total"].tolist() == [3, 4]
    assert read["twice"].tolist() == [6, 8]
    assert read["name"] == "n"
    artifact.reset()
    assert read["total"].tolist() == [3, 4]
    assert artifact.read()["total"].tolist() == [1, 2]


def test_an_input_that_is_written_to(tmp_path):
    class Fill(torch.nn.Module):
        def forward(self, cache, x, at):
            cache.index_copy_(0, at[None], x[None])
            return cache.sum()

    spec = {"cache": Tensor(("n", 3)), "x": Tensor((3,)), "at": Tensor((), "int64")}
    fx2relax.export(Fill(), {"forward": spec}).save(tmp_path / "artifact")
    artifact = fx2relax.load(tmp_path / "artifact")
    cache = np.zeros((4, 3), np.float32)
    total = artifact.forward(cache, np.ones(3, np.float32), np.array(2))
    assert total == 3
    assert cache.sum(1).tolist() == [0, 0, 3, 0]


def test_weights_of_other_widths(tmp_path):
    exported = fx2relax.export(
        torch.nn.Linear(4, 7),
        {"forward": {"input": Tensor(("batch", 4))}},
        weights={"weight": ("n", 4), "bias": ("n",)},
    )
    with pytest.raises(fx2relax.WeightError, match="2 weights have no data: weight, bias"):
        exported.save(tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()
    exported.build().save(tmp_path / "artifact", weights=False)
    for width in (3, 9):
        given = {"weight": torch.randn(width, 4), "bias": torch.randn(width)}
        artifact = fx2relax.load(tmp_path / "artifact", weights=given, out="torch")
        x = torch.randn(5, 4)
        eager = torch.nn.functional.linear(x, given["weight"], given["bias"])
        assert torch.allclose(artifact.forward(x), eager, atol=1e-6)


def test_sizes_are_checked(tmp_path):
    class Double(torch.nn.Module):
        def forward(self, x, n):
            return x * 2, torch.ones(n)

    size = fx2relax.Dim("rows", min=2, max=8, multiple_of=2)
    spec = {"x": Tensor((size, "2*k")), "n": "k"}
    fx2relax.export(Double(), {"forward": spec}).save(tmp_path / "artifact")
    artifact = fx2relax.load(tmp_path / "artifact")
    doubled, ones = artifact.forward(np.ones((4, 6), np.float32), 3)
    assert doubled.shape == (4, 6)
    assert ones.shape == (3,)
    for rows, columns, n in ((3, 6, 3), (10, 6, 3), (4, 7, 3), (4, 6, 2)):
        with pytest.raises(ValueError, match=r"rows|x|n|k"):
            artifact.forward(np.ones((rows, columns), np.float32), n)


def test_jit_gives_torch_callables():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return self.layer(x).relu()

        def scores(self, x):
            return self.layer(x).softmax(-1), self.count * 1

    model = Two()
    spec = {"x": Tensor(("n", 4))}
    compiled = fx2relax.jit(model, {"forward": spec, "scores": spec})
    for rows in (1, 5):
        x = torch.randn(rows, 4)
        assert torch.allclose(compiled.forward(x), model.layer(x).relu(), atol=1e-6)
        scores, count = compiled["scores"](x)
        assert torch.allclose(scores, model.layer(x).softmax(-1), atol=1e-6)
    assert int(count) == 2
    assert int(model.count) == 0
    with pytest.raises(fx2relax.OptionError, match="out_format='keras'"):
        fx2relax.jit(model, {"forward": spec}, out_format="keras")
    with torch.device("meta"):
        empty = Two()
    with pytest.raises(fx2relax.WeightError, match="3 weights have no data"):
        fx2relax.jit(empty, {"forward": spec})


def test_tied_weights_are_one(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(7, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.words(ids))

    model = Tied()
    exported = fx2relax.export(model, {"forward": {"ids": Tensor(("n",), "int64")}})
    assert list(exported.params) == ["words.weight"]
    assert exported.params.load_state_dict(model.state_dict()) == ([], [])
    exported.save(tmp_path / "artifact")
    ids = torch.tensor([3, 1])
    ours = fx2relax.load(tmp_path / "artifact", out="torch").forward(ids)
    assert torch.allclose(ours, model(ids), atol=1e-6)


def test_weights_out_of_files_that_are_not_read_whole(tmp_path):
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = torch.nn.Linear(4, 3)
    given = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    save_file({"weight": given["weight"]}, tmp_path / "one.safetensors")
    save_file({"bias": given["bias"]}, tmp_path / "two.safetensors")
    exported = fx2relax.export(model, {"forward": {"input": Tensor(("n", 4))}})
    files = (tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    assert exported.params.load_safetensors(*files) == ([], [])
    exported.save(tmp_path / "artifact")
    x = torch.randn(2, 4)
    ours = fx2relax.load(tmp_path / "artifact", out="torch").forward(x)
    assert torch.allclose(ours, torch.nn.functional.linear(x, *given.values()), atol=1e-6)


def test_a_function_without_weights_beside_one_with_some(tmp_path):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)

        def scaled(self, x):
            return x * 3

        def weight(self):
            return self.layer.weight

    model = Two()
    spec = {"x": Tensor(("n", 4))}
    functions = {"forward": spec, "scaled": spec, "weight": {}}
    exported = fx2relax.export(model, functions)
    for number, chosen in enumerate((exported, exported.lift(), exported.lift(["forward"]))):
        chosen.save(tmp_path / str(number))
        artifact = fx2relax.load(tmp_path / str(number), out="torch")
        x = torch.randn(2, 4)
        assert torch.equal(artifact.scaled(x), x * 3)
        assert torch.allclose(artifact.forward(x), model(x), atol=1e-6)
        assert torch.equal(artifact.weight(), model.layer.weight)


class Talks(torch.nn.Module):
    """Prints what it is given and what it makes, and says how often it was called."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        print("given", x, "{}", x.shape[0], sep="|")
        self.calls += 1
        y = self.layer(x)
        print("sum", y.sum(), end="!\n")
        return y, self.calls * 1


def test_prints_print_where_the_function_runs(tmp_path, capsys):
    model = Talks()
    with torch.no_grad():
        model.layer.weight.copy_(torch.eye(2))
        model.layer.bias.zero_()
    exported = fx2relax.export(model, {"forward": {"x": Tensor(("n", 2))}}, debug=True)
    assert capsys.readouterr().out == ""
    function = exported.mod["forward"]
    assert [str(p.name) for p in function.params[:3]] == ["x", "calls", "_io"]
    assert int(function.attrs["num_input"]) == 3
    begun = exported.mod["_initialize_effect"]
    assert len(begun.params) == 0
    for chosen in (exported, exported.lift()):
        chosen.save(tmp_path / "artifact")
        artifact = fx2relax.load(tmp_path / "artifact")
        y, calls = artifact.forward(np.array([[1, 2]], np.float32))
        assert y.tolist() == [[1, 2]]
        assert calls == 1
        said = "given|[[1. 2.]]|{}|1\nsum 3.0!\n"
        assert capsys.readouterr().out == said
        artifact.forward(np.array([[1, 2]], np.float32))
        assert capsys.readouterr().out == said


def test_without_debug_a_print_is_pythons(capsys):
    fx2relax.export(Talks(), {"forward": {"x": Tensor((3, 2))}})
    assert capsys.readouterr().out.startswith("given|")


def test_weights_stored_in_half_precision(tmp_path):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    exported = fx2relax.export(model, {"forward": {"input": Tensor(("n", 4))}})
    halved = exported.to("float16", "0.weight", "2.weight")
    assert [p.dtype for p in halved.params.values()] == ["float16", "float32"] * 2
    state = {
        "0.weight": torch.randn(3, 4).half(),
        "0.bias": torch.randn(3),
        "2.weight": torch.randn(2, 3).half(),
        "2.bias": torch.randn(2),
    }
    halved.params.load_state_dict(state)
    for number, chosen in enumerate((halved, halved.lift())):
        chosen.save(tmp_path / str(number))
        ours = fx2relax.load(tmp_path / str(number), out="torch")
        x = torch.randn(5, 4)
        hidden = torch.nn.functional.linear(x, state["0.weight"].float(), state["0.bias"]).relu()
        eager = torch.nn.functional.linear(hidden, state["2.weight"].float(), state["2.bias"])
        assert torch.allclose(ours.forward(x), eager, atol=1e-5)
    with pytest.raises(fx2relax.WeightError, match=r"unbind these weights first: 0\.weight"):
        halved.to("bfloat16")
    assert [p.dtype for p in exported.to("bfloat16").params.values()] == ["bfloat16"] * 4


def test_branches_that_depend_on_values(tmp_path):
    class Branches(torch.nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,))

    fx2relax.export(Branches(), {"forward": {"x": Tensor((3,))}}).save(tmp_path / "artifact")
    artifact = fx2relax.load(tmp_path / "artifact")
    ones = np.ones(3, np.float32)
    assert artifact.forward(ones).tolist() == [2, 2, 2]
    assert artifact.forward(-ones).tolist() == [-2, -2, -2]
