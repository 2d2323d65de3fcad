"""Kernels in object files and source in imported and compiled programs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from extern_sources import FILL, kernels, small, traced

import fx2relax
from fx2relax import BuildFailure, pipeline, report
from fx2relax.compat import op, relax, tvm
from fx2relax.errors import ArgumentError, KernelFailure

erfinv = torch.ops.aten.erfinv.default
KERNELS = kernels()


def scaled(x):
    return KERNELS["scale"](x, 5.0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("library", ["torch", "none"])
def test_a_converter_that_calls_a_kernel(dynamic, library):
    report.reset_stats()
    options = {"on_unsupported": "raise", "library": library}
    torch._dynamo.reset()
    with fx2relax.overrides({erfinv: scaled}):
        compiled = torch.compile(
            lambda x: (x + x).erfinv() + 1, backend="relax", dynamic=dynamic, options=options
        )
        for n in (2, 5):
            x = torch.randn(n, 3)
            torch.testing.assert_close(compiled(x), 10 * x + 1)
    assert report.stats()["nodes_fallback"] == 0


def module(converter=scaled, sizes=("n", 3)):
    with fx2relax.overrides({erfinv: converter}):
        return fx2relax.from_fx(traced(), [(sizes, "float32")])


def test_a_module_says_which_objects_it_needs():
    mod = module()
    text = mod.script()
    assert 'R.call_dps_packed("add"' in text
    assert mod["main"].attrs["fx2relax.operators"][0] == "add=scale"
    assert len(mod.attrs["external_mods"]) == 1


@pytest.mark.parametrize("build", [pipeline.build, relax.build], ids=["ours", "tvm's"])
def test_a_module_is_built(build):
    alone = small("alone_f32", FILL.format(10))
    mod = module(lambda x: op.reshape(alone["alone_f32"](op.reshape(x, [6])), [2, 3]), (2, 3))
    machine = relax.VirtualMachine(build(mod), tvm.cpu())
    assert machine["main"](torch.ones(2, 3)).numpy().tolist() == [[11.0] * 3] * 2


def test_the_library_works_where_this_package_is_not(tmp_path):
    lowered = pipeline.lower(module(), library="none")
    ready, _ = pipeline.give(as_tuple(lowered), "main", 1)
    library = pipeline.library_code(ready)
    path = tmp_path / "program.so"
    path.write_bytes(library)
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['fx2relax'] = None  # not to be found\n"
        "import tvm, numpy as np\n"
        "from tvm import relax\n"
        f"vm = relax.VirtualMachine(tvm.runtime.load_module({str(path)!r}), tvm.cpu())\n"
        "out = tvm.runtime.empty((4, 3), 'float32')\n"
        "x = tvm.runtime.tensor(np.ones((4, 3), 'float32'))\n"
        "vm['main'](x, out)\n"
        "assert (out.numpy() == 11).all(), out\n"
        "print('works')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "works\n", done.stderr


def test_functions_take_their_objects_into_another_module():
    one = module()
    two = module()
    both = tvm.IRModule({"one": one["main"], "two": two["main"]})
    for name in ("one", "two"):
        both[name] = both[name].with_attr("global_symbol", name)
    assert "external_mods" not in (both.attrs or {})
    machine = relax.VirtualMachine(pipeline.build(both, library="none"), tvm.cpu())
    for name in ("one", "two"):
        assert machine[name](torch.ones(2, 3)).numpy().tolist() == [[11.0] * 3] * 2


def test_a_module_of_another_process_without_its_objects():
    mod = module()
    function = mod["main"].with_attr("fx2relax.objects", ["0" * 20])
    alone = tvm.IRModule({"main": function})
    with pytest.raises(BuildFailure, match="the kernels of scale are in objects that this process"):
        pipeline.build(alone, library="none")


def test_a_module_keeps_its_objects_where_work_on_weights_is_lifted():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return x.erfinv() @ (self.w.t() + 1).t()

    model = Model().eval()
    with fx2relax.overrides({erfinv: scaled}):
        mod = fx2relax.from_fx(torch.fx.symbolic_trace(model), [((2, 3), "float32")])
    lowered = pipeline.lower(mod, library="none", lift_weights=True)
    assert "main_transform_params" in {v.name_hint for v in lowered.get_global_vars()}
    machine = relax.VirtualMachine(pipeline.assemble(lowered), tvm.cpu())
    x = torch.randn(2, 3)
    weights = machine["main_transform_params"]((model.w.detach(),))
    result = torch.from_dlpack(machine["main"](x, *weights))
    torch.testing.assert_close(result, 5 * x @ (model.w.detach() + 1))


def as_tuple(mod):
    """The module with a function that returns a tuple of one, as `give` takes it."""
    function = mod["main"]
    body = function.body
    last = relax.Var("whole", relax.TupleType([body.body.ty]))
    blocks = [*body.blocks, relax.BindingBlock([relax.VarBinding(last, relax.Tuple([body.body]))])]
    mod["main"] = relax.Function(
        function.params,
        relax.SeqExpr(blocks, last),
        last.ty,
        function.is_pure,
        function.attrs,
    )
    return mod


def test_a_size_of_the_graph_reaches_the_kernel():
    def widened(x):
        n, m = x.ty.shape.values
        return KERNELS["widen"](x, op.zeros(relax.ShapeExpr([m + n]), "float32"), n, False)

    mod = fx2relax.from_fx(
        torch.fx.symbolic_trace(lambda x: widened_of(x) * 2),
        [(("n", 3), "float32")],
        call_function_map={widened_of: widened},
    )
    machine = relax.VirtualMachine(pipeline.build(mod, library="none"), tvm.cpu())
    x = torch.randn(2, 3)
    result = torch.from_dlpack(machine["main"](x))
    torch.testing.assert_close(result, torch.nn.functional.pad(x, (0, 2)) * 2)


@torch.fx.wrap
def widened_of(x):
    return torch.cat([x, x.new_zeros(x.shape[0], x.shape[0])], 1)


@pytest.mark.parametrize("name", ["refuse", "crash"])
def test_a_compiled_kernel_that_raises_is_named(name):
    torch._dynamo.reset()
    with fx2relax.overrides({erfinv: lambda x: KERNELS[name](x)}):
        compiled = torch.compile(lambda x: x.erfinv() + 1, backend="relax")
        with pytest.raises(KernelFailure, match=f"the kernel of {name} raised") as caught:
            compiled(torch.ones(3))
    assert caught.value.__cause__ is not None


def test_an_error_beside_a_kernel_is_not_the_kernels():
    torch._dynamo.reset()
    with fx2relax.overrides({erfinv: scaled}):
        compiled = torch.compile(lambda x, i: x.erfinv()[i], backend="relax")
        with pytest.raises(IndexError):
            compiled(torch.ones(3, 3), torch.tensor([7]))


def test_a_program_with_an_object_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path))
    report.reset_stats()
    torch._dynamo.reset()
    with fx2relax.overrides({erfinv: scaled}):
        compiled = torch.compile(lambda x: x.erfinv(), backend="relax")
        compiled(torch.ones(2, 3))
    torch._dynamo.reset()
    with fx2relax.overrides({erfinv: lambda x: KERNELS["scale"](x, 7.0)}):
        compiled = torch.compile(lambda x: x.erfinv(), backend="relax")
        assert compiled(torch.ones(2, 3))[0, 0].item() == 7
    assert report.stats()["cache_hits"] == 0


def test_a_rule_that_static_sizes_break():
    with (
        fx2relax.overrides({erfinv: lambda x: KERNELS["scale"](op.sum(x, 1), 1.0)}),
        pytest.raises(ArgumentError, match="scale: argument '0' has 1 axes, it takes 2"),
    ):
        fx2relax.from_fx(traced(), [((3, 3), "float32")])
