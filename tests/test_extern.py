"""Kernels in object files and source: symbols, shape rules, dtypes, errors, and linking."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from extern_sources import CODE, FUNCTIONS, N, kernels

import fx2relax
from fx2relax import BuildFailure, extern, pipeline, report
from fx2relax.compat import op, relax, tvm
from fx2relax.errors import ArgumentError, KernelFailure
from fx2relax.extern import ExternFunction
from fx2relax.object_symbols import read_symbols
from fx2relax.rules import Seen, match, seen
from fx2relax.runtime import toolchain
from fx2relax.spec import Tensor

erfinv = torch.ops.aten.erfinv.default
KERNELS = kernels()
HEAD = "#include <tvm/ffi/container/tensor.h>\n#include <tvm/ffi/function.h>\n"
COPY = """
static void copy(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {{ {body} }}
TVM_FFI_DLL_EXPORT_TYPED_FUNC({symbol}, copy);
"""
ONE = ExternFunction([Tensor(N)], Tensor(N))


def small(symbol: str, body: str = "", extra: str = "", **kwargs):
    """A source of one kernel of one axis."""
    code = HEAD + extra + COPY.format(symbol=symbol, body=body)
    return extern.source(code, functions={symbol: ONE}, **kwargs)


FILL = "for (int64_t i = 0; i < x.numel(); ++i) static_cast<float*>(y.data_ptr())[i] = {};"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/fx2relax/native"


@pytest.fixture(scope="module")
def object_bytes():
    return toolchain.compile_object(CODE, "cpp", "kernels.cpp", [])


# -- eager ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (3, 0), (1, 1)])
def test_the_dtype_chooses_the_symbol(dtype, shape):
    x = torch.randn(shape, dtype=dtype)
    result = KERNELS["scale"](x, 3.0)
    torch.testing.assert_close(result, x * 3)


@pytest.mark.parametrize(
    "x",
    [torch.randn(3, 4).t(), torch.randn(4, 3)[:, ::2], torch.randn(3).expand(2, 3)],
    ids=["permuted", "strided", "expanded"],
)
def test_arguments_are_made_compact(x):
    torch.testing.assert_close(KERNELS["scale"](x, 2.0), x * 2)


def test_a_misaligned_argument():
    x = torch.randn(13)[1:].view(3, 4)
    torch.testing.assert_close(KERNELS["scale"](x, 2.0), x * 2)


def test_several_results_of_several_dtypes():
    x = torch.randn(4, 5)
    sums, places = KERNELS["rows"](x)
    torch.testing.assert_close(sums, x.sum(1))
    assert torch.equal(places, x.argmax(1))


def test_a_result_without_axes():
    x = torch.randn(7)
    torch.testing.assert_close(KERNELS["sum_all"](x), x.sum())
    assert KERNELS["sum_all"](torch.empty(0)).item() == 0


def test_numbers_and_a_tensor_that_is_left_out():
    x, w = torch.randn(2, 3), torch.randn(5)
    wide = torch.nn.functional.pad(x, (0, 2))
    torch.testing.assert_close(KERNELS["widen"](x, w, 2, False), wide + w)
    torch.testing.assert_close(KERNELS["widen"](x, w, 2, True), -(wide + w))
    with pytest.raises(ArgumentError, match="the size 'w' is that of a tensor left out"):
        KERNELS["widen"](x, None, 2, True)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("scale", (torch.ones(2), 1.0), r"argument '0' has 1 axes, it takes 2: \(n, m\)"),
        ("scale", (torch.ones(2, 2).int(), 1.0), r"is int32; it takes \(float32\) or \(float64\)"),
        ("scale", (torch.ones(2, 2), "1"), "argument '1' is str, not float"),
        ("scale", (torch.ones(2, 2), True), "argument '1' is bool, not float"),
        ("scale", (1.0, 2.0), "argument '0' is float, not a tensor"),
        ("scale", (torch.ones(2, 2),), "takes 2 arguments, not 1"),
        ("rows", (torch.ones(2, 2).double(),), "'0' is float64, it takes float32"),
        ("rows", (torch.ones(2, 2, dtype=torch.complex64),), "'0' is complex64"),
        ("widen", (torch.ones(2, 2), torch.ones(3), 1.5, True), "argument '2' is float, not int"),
    ],
)
def test_wrong_arguments(name, args, message):
    with pytest.raises(ValueError, match=message) as caught:
        KERNELS[name](*args)
    assert str(caught.value).startswith(name)


def test_sizes_that_have_to_be_equal():
    pair = ExternFunction([Tensor(("n", "m")), Tensor(("m",))], Tensor(("n",)))
    kernel = extern.object(
        toolchain.compile_object(CODE, "cpp", "kernels.cpp", []), {"rows": pair}
    )["rows"]
    with pytest.raises(ArgumentError, match=r"'1' has the shape \(4,\), it takes \(m,\), here \(3"):
        kernel(torch.ones(2, 3), torch.ones(4))


@pytest.mark.parametrize(
    ("name", "words"),
    [("refuse", "refuse raised ValueError: no such thing"), ("crash", "crash raised .*: out of")],
)
def test_a_kernel_that_raises(name, words):
    with pytest.raises(KernelFailure, match=f"the kernel of {words}") as caught:
        KERNELS[name](torch.ones(2))
    assert caught.value.__cause__ is not None


SEED = (
    HEAD
    + """
#include <tvm/ffi/error.h>
namespace {
int scalar_add(DLTensor* a, DLTensor* b, DLTensor* c) {
  TVM_FFI_CHECK(a->ndim == 0 && b->ndim == 0 && c->ndim == 0, ValueError);
  *static_cast<float*>(c->data) = *static_cast<float*>(a->data) + *static_cast<float*>(b->data);
  return 0;
}
int test_sym(DLTensor* a, DLTensor* b, DLTensor* c) {
  int64_t x = a->shape[0], y = a->shape[1], z = b->shape[1];
  bool good = a->ndim == 3 && b->ndim == 3 && c->ndim == 4 && a->shape[2] == 1;
  good = good && b->shape[0] == y && b->shape[2] == 5 && c->shape[0] == x && c->shape[1] == y;
  TVM_FFI_CHECK(good && c->shape[2] == z && c->shape[3] == 9, ValueError);
  for (int64_t i = 0; i < x * y * z * 9; ++i) static_cast<float*>(c->data)[i] = i;
  return 0;
}
}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ext_scalar_add, scalar_add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ext_test_sym, test_sym);
"""
)
SEED_FUNCTIONS = {
    "ext_scalar_add": ExternFunction([Tensor(()), Tensor(())], Tensor(())),
    "ext_test_sym": ExternFunction(
        [Tensor(("x", "y", 1)), Tensor(("y", "z", 5))], Tensor(("x", "y", "z", 9))
    ),
}


@torch.fx.wrap
def scalar_add_of(a, b):
    return a + b


@torch.fx.wrap
def sizes_of(a, b):
    return a.new_zeros(a.shape[0], a.shape[1], b.shape[1], 9)


def test_scalars_and_sizes_that_two_tensors_show():
    mine = extern.source(SEED, functions=SEED_FUNCTIONS)
    a, b = torch.randn(3, 4, 1), torch.randn(4, 2, 5)
    assert mine["ext_scalar_add"](torch.tensor(1.0), torch.tensor(2.0)).item() == 3
    wanted = torch.arange(3 * 4 * 2 * 9.0).view(3, 4, 2, 9)
    assert torch.equal(mine["ext_test_sym"](a, b), wanted)

    def network(a, b, one, two):
        return sizes_of(a, b) * scalar_add_of(one, two)

    mod = fx2relax.from_fx(
        torch.fx.symbolic_trace(network),
        [(("x", "y", 1), "float32"), (("y", "z", 5), "float32"), ((), "float32"), ((), "float32")],
        call_function_map={
            sizes_of: mine["ext_test_sym"],
            scalar_add_of: mine["ext_scalar_add"],
        },
    )
    machine = relax.VirtualMachine(pipeline.build(mod, library="none"), tvm.cpu())
    result = machine["main"](a, b, torch.tensor(1.0), torch.tensor(2.0))
    assert torch.equal(torch.from_dlpack(result), wanted * 3)


# -- rules ------------------------------------------------------------------------------------


def test_a_size_that_no_argument_shows():
    with pytest.raises(ValueError, match="no argument shows the size k"):
        ExternFunction([Tensor(("n",))], Tensor(("k",)))


def test_sizes_that_are_text_over_names():
    rule = ExternFunction([Tensor(("n",)), Tensor(("2*n + 1",))], Tensor(("n*3 // 2",)))
    values = [seen(torch.ones(4)), seen(torch.ones(9))]
    assert match([rule], values, "op", ["a", "b"]).results() == [Seen((6,), "float32")]
    with pytest.raises(
        ArgumentError, match=r"'b' has the shape \(8,\), it takes \(2\*n \+ 1,\), h"
    ):
        match([rule], [values[0], seen(torch.ones(8))], "op", ["a", "b"])
    with pytest.raises(ValueError, match="no argument shows the size k"):
        ExternFunction([Tensor(("n",))], Tensor(("2*k",)))
    with pytest.raises(ValueError, match=r"made of names and ints with \+ - \* // %, not 'n / 2'"):
        ExternFunction([Tensor(("n",))], Tensor(("n / 2",)))


def test_a_rule_of_what_is_no_argument():
    with pytest.raises(ValueError, match="no Tensor, int, float, bool or name"):
        ExternFunction([None], Tensor(()))


def test_two_variables_of_one_name_are_two_sizes():
    from fx2relax.compat import tirx

    n, other = tirx.Var("n", "int64"), tirx.Var("n", "int64")
    two = ExternFunction([Tensor((n,)), Tensor((other,))], Tensor((n + other,)))
    code = HEAD + (
        "static void join(tvm::ffi::TensorView a, tvm::ffi::TensorView b, tvm::ffi::TensorView y)"
        "{ for (int64_t i = 0; i < y.numel(); ++i) static_cast<float*>(y.data_ptr())[i] = "
        "static_cast<float*>((i < a.numel() ? a : b).data_ptr())[i < a.numel() ? i : i - a.numel()"
        "]; }\nTVM_FFI_DLL_EXPORT_TYPED_FUNC(join, join);"
    )
    join = extern.source(code, functions={"join": two})["join"]
    a, b = torch.randn(2), torch.randn(3)
    assert torch.equal(join(a, b), torch.cat([a, b]))
    mod = fx2relax.from_fx(
        torch.fx.symbolic_trace(lambda a, b: join_of(a, b)),
        [(("p",), "float32"), (("q",), "float32")],
        call_function_map={join_of: join},
    )
    assert [str(s) for s in mod["main"].ret_ty.shape.values] == ["p + q"]


@torch.fx.wrap
def join_of(a, b):
    return torch.cat([a, b])


# -- symbols ----------------------------------------------------------------------------------


def test_a_missing_symbol_is_named_with_those_that_there_are(object_bytes):
    with pytest.raises(BuildFailure) as caught:
        extern.object(object_bytes, {"scale_f16": ONE, "rows": ONE}, name="kernels.o")
    message = str(caught.value)
    assert "kernels.o exports no 'scale_f16'; it exports 'add', 'crash', " in message
    assert "TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale_f16, ...)" in message


def test_a_missing_symbol_of_source_is_found_when_it_is_built():
    code = 'extern "C" int __tvm_ffi_one(void*, const void*, int, void*) { return 0; }'
    source = extern.source(code, functions={"two": ONE})
    with pytest.raises(BuildFailure, match="exports no 'two'; it exports 'one'"):
        source.build()


def test_the_reader_sees_what_nm_sees(object_bytes, tmp_path):
    path = tmp_path / "kernels.o"
    path.write_bytes(object_bytes)
    symbols = read_symbols(object_bytes)
    nm = subprocess.run(["nm", "-g", str(path)], capture_output=True, text=True, check=True)
    lines = [line.split() for line in nm.stdout.splitlines()]
    defined = {line[-1] for line in lines if line[-2] not in "Uvw"}
    assert symbols.strong | symbols.weak == defined
    assert {line[-1] for line in lines if line[-2] == "T"} == symbols.strong
    assert symbols.functions == {
        "add", "scale_f64", "rows", "widen", "sum_all", "refuse", "crash"
    }  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"text", b"\x7fELF\x02\x01" + b"\0" * 40])
def test_what_is_no_object(data):
    with pytest.raises(ValueError, match="the file is no"):
        read_symbols(data, "the file")


def test_a_linked_library_is_no_object(object_bytes):
    library = toolchain.link([(object_bytes, ())], "kernels")
    with pytest.raises(ValueError, match="is linked already"):
        extern.object(library, {"rows": ONE})


def test_an_object_of_a_path(object_bytes, tmp_path):
    path = tmp_path / "kernels.o"
    path.write_bytes(object_bytes)
    given = extern.object(path, FUNCTIONS)
    assert given.name == "kernels.o"
    assert list(given) == list(FUNCTIONS)
    assert given["sum_all"](torch.ones(3)).item() == 3
    with pytest.raises(KeyError, match=r"kernels.o has no kernel 'x'; it has scale, rows"):
        given["x"]
    with pytest.raises(OSError, match="no-such"):
        extern.object(tmp_path / "no-such.o", FUNCTIONS)


@pytest.mark.parametrize("symbol", ["kept", "helper"])
def test_two_objects_with_one_symbol(symbol):
    helper = 'extern "C" __attribute__((visibility("default"))) int helper() { return 1; }\n'
    one, two = (
        extern.source(
            (helper if symbol == "helper" else "") + 'extern "C" '
            f"int __tvm_ffi_{name}(void*, const void*, int, void*) {{ return {answer}; }}",
            functions={name: ONE},
            name=f"{file}.cpp",
        )
        for file, name, answer in (
            ("one", "kept", 1),
            ("two", "other" if symbol == "helper" else "kept", 2),
        )
    )

    def both(x):
        x = op.reshape(x, [3])
        return op.add(one["kept"](x), next(two[name] for name in two)(x))

    with (
        fx2relax.overrides({erfinv: both}),
        pytest.raises(BuildFailure, match=f"one.cpp and two.cpp both define '{symbol}'"),
    ):
        fx2relax.from_fx(traced(), [((3,), "float32")])


def test_one_object_twice_is_one(object_bytes):
    one = extern.object(object_bytes, FUNCTIONS, name="first.o")
    two = extern.object(object_bytes, FUNCTIONS, name="second.o")

    def both(x):
        return op.add(one["scale"](x, 2.0), two["scale"](x, 3.0))

    with fx2relax.overrides({erfinv: both}):
        compiled = torch.compile(lambda x: x.erfinv(), backend="relax", fullgraph=True)
        torch.testing.assert_close(compiled(torch.ones(2, 3)), torch.full((2, 3), 5.0))


# -- the compiler -----------------------------------------------------------------------------


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


# -- compiled ---------------------------------------------------------------------------------


def traced():
    return torch.fx.symbolic_trace(lambda x: (x + x).erfinv() + 1)


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
