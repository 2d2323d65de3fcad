"""Kernels in object files and source: symbols, shape rules, dtypes, errors, and linking."""

from __future__ import annotations

import subprocess

import pytest
import torch
from extern_sources import CODE, FUNCTIONS, HEAD, ONE, kernels, traced

import fx2relax
from fx2relax import BuildFailure, extern, pipeline
from fx2relax.compat import op, relax, tvm
from fx2relax.errors import ArgumentError, KernelFailure
from fx2relax.extern import ExternFunction
from fx2relax.object_symbols import read_symbols
from fx2relax.rules import Seen, match, seen
from fx2relax.runtime import toolchain
from fx2relax.spec import Tensor

erfinv = torch.ops.aten.erfinv.default
KERNELS = kernels()


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
