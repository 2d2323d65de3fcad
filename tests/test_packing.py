"""Packed weights and products of few rows: where they are used, and that nothing is lost by it."""

import itertools

import pytest
import torch
import tvm_ffi
from library_calls import function, lowered, passed

from fx2relax import onednn
from fx2relax.pipeline import packing
from fx2relax.runtime import compiled, library, native
from fx2relax.runtime.packed_at_use import packed_at_use
from fx2relax.testing import assert_matches_eager

pytestmark = pytest.mark.skipif(not native.use(), reason="no C++ compiler")
mkldnn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")

random = torch.randn


# Few rows


@pytest.mark.parametrize("rows", [*range(1, 10), 13, 16, 23, 32])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_few_rows(rows, turned, biased):
    """Within the rounding of a float32 sum, for sizes around those of vectors and blocks."""
    if rows > packing.few_rows(turned):
        pytest.skip("so many are the library's")
    for k, n in itertools.product((0, 1, 7, 8, 33, 300), (0, 1, 2, 3, 5, 17, 64)):
        x, weight, bias = random(rows, k), random(n, k), [random(n)] if biased else []
        out = torch.full((rows, n), 7.0)
        given = weight if turned else weight.t().contiguous()
        function(f"rows_n{'nt'[turned]}")(*passed(x, given, *bias, out))
        exact = x.double() @ weight.double().t() + (bias[0].double() if biased else 0)
        bound = x.double().abs() @ weight.double().abs().t() + 3
        assert torch.all((out - exact).abs() <= bound * 2.0**-22)


@pytest.mark.parametrize("turned", [False, True])
def test_few_rows_of_more_axes_and_of_one(turned):
    weight = random(9, 16)
    for shape in ((16,), (2, 3, 16), (0, 16), (2, 0, 16)):
        x, out = random(*shape), torch.empty(*shape[:-1], 9)
        given = weight if turned else weight.t().contiguous()
        function(f"rows_n{'nt'[turned]}")(*passed(x, given, out))
        torch.testing.assert_close(out, x @ weight.t())


@pytest.mark.parametrize("turned", [False, True])
def test_more_rows_are_the_library_s(turned):
    x, weight = random(33, 16), random(9, 16)
    given = weight if turned else weight.t().contiguous()
    results = [torch.empty(33, 9) for _ in range(2)]
    for kind, out in zip(("rows", "matmul"), results, strict=True):
        function(f"{kind}_n{'nt'[turned]}")(*passed(x, given, out))
    assert torch.equal(*results)


@pytest.mark.parametrize("turned", [False, True])
def test_special_values_in_few_rows(turned):
    x, weight = random(3, 40), random(9, 40)
    x[0, 0], x[1, 39], weight[2, 20] = float("nan"), float("inf"), -float("inf")
    out = torch.empty(3, 9)
    given = weight if turned else weight.t().contiguous()
    function(f"rows_n{'nt'[turned]}")(*passed(x, given, out))
    expected = x @ weight.t()
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n"), [(2, 300, 5000), (3, 1041, 770), (8, 520, 1030), (1, 5000, 130), (13, 70, 29)]
)
def test_few_rows_come_out_the_same_in_any_number_of_threads(m, k, n, turned):
    x, weight, bias = random(m, k), random(*((n, k) if turned else (k, n))), random(n)
    results, before = [], torch.get_num_threads()
    try:
        # The second time a weight comes, threads share it by what they hold.
        for threads in (1, 2, 3, 4, 4, 2, 2):
            torch.set_num_threads(threads)
            results.append(torch.full((m, n), float("nan")))
            function(f"rows_n{'nt'[turned]}")(*passed(x, weight, bias, results[-1]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    exact = torch.addmm(bias.double(), x.double(), (weight.t() if turned else weight).double())
    torch.testing.assert_close(results[0].double(), exact, rtol=1e-5, atol=1e-5 * k**0.5)


def test_what_few_rows_do_not_take_is_python_s():
    x, weight, out = random(3, 16, dtype=torch.float64), random(9, 16).double(), torch.empty(3, 9)
    before = native.declined()
    function("rows_nt")(*passed(x, weight, out))
    assert native.declined() == before + 1
    torch.testing.assert_close(out, (x.float() @ weight.float().t()))


# Convolutions that return their output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_that_return_their_output(dtype, last, groups):
    x, weight = random(2, 4, 7, 7).to(dtype), random(8, 4 // groups, 3, 3).to(dtype)
    bias, settings = random(8).to(dtype), tvm_ffi.Shape((2, 2, 1, 1, 1, 1, 0, 0, groups, 0))
    if last:
        x, weight = (t.permute(0, 2, 3, 1).contiguous() for t in (x, weight))
    name = "new_conv2d_nhwc" if last else "new_conv2d"
    before = native.declined()
    made = torch.from_dlpack(function(name)(*passed(x, weight, bias, settings)))
    assert native.declined() == before
    expected = library.FUNCTIONS[name](*passed(x, weight, bias, settings))
    assert made.is_contiguous()
    assert made.data_ptr() % 64 == 0
    assert torch.equal(made, expected)


# Packed weights


@mkldnn
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_packed_convolutions(last, biased, batch):
    x, weight = random(batch, 16, 9, 9), random(32, 16, 3, 3)
    bias, values = [random(32)] if biased else [], (2, 2, 1, 1, 1, 1, 0, 0, 1, 0)
    expected = torch.conv2d(x, weight, *bias, stride=2, padding=1)
    settings, ending = tvm_ffi.Shape(values), "_nhwc" if last else ""
    sizes = tvm_ffi.Shape(tuple(x.shape))
    if last:
        x, weight = (t.permute(0, 2, 3, 1).contiguous() for t in (x, weight))
        expected = expected.permute(0, 2, 3, 1)
    held = function(f"pack_conv{ending}")(*passed(weight, settings, sizes))
    made = function(f"packed_conv{ending}")(*passed(x), held, *passed(*bias, settings))
    made = torch.from_dlpack(made)
    assert made.is_contiguous()
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available(),
    reason="PyTorch was built without MKL",
)


@mkldnn
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_products(turned, biased):
    x, weight, bias = random(4, 30, 64), random(96, 64), [random(96)] if biased else []
    given = weight if turned else weight.t().contiguous()
    held = function("pack_linear")(*passed(given, tvm_ffi.Shape((int(turned), 120))))
    made = torch.from_dlpack(function("packed_linear")(*passed(x), held, *passed(*bias)))
    torch.testing.assert_close(made, torch.nn.functional.linear(x, weight, *bias))


half = pytest.mark.skipif(
    not onednn.computes_in("bfloat16"),
    reason="oneDNN does not compute in bfloat16 on this processor",
)


@mkldnn
@half
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_products_in_bfloat16_are_eagers(rows, biased):
    x, weight, *bias = (t.bfloat16() for t in (random(rows, 64), random(96, 64), random(96)))
    bias = bias if biased else []
    held = function("pack_linear")(*passed(weight, tvm_ffi.Shape((1, 256))))
    made = torch.from_dlpack(function("packed_linear")(*passed(x), held, *passed(*bias)))
    torch.testing.assert_close(made, torch.nn.functional.linear(x, weight, *bias), rtol=0, atol=0)


@mkldnn
def test_errors_of_packed_calls():
    held = function("pack_linear")(*passed(random(96, 64), tvm_ffi.Shape((1, 120))))
    with pytest.raises(RuntimeError, match="does not take"):
        function("packed_linear")(*passed(random(3, 64), random(96, 64)))
    with pytest.raises(RuntimeError, match=r"primitive|failed"):
        function("packed_linear")(*passed(random(3, 5)), held)


@pytest.fixture
def net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(64, 128, 3, bias=False),
        torch.nn.BatchNorm2d(128),
        torch.nn.ReLU(),
        torch.nn.Conv2d(128, 64, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 25, 10),
    ).eval()


@mkldnn
def test_a_net_is_packed_and_a_changed_weight_is_seen(net, monkeypatch):
    x = random(1, 64, 9, 9)
    text, run = lowered(net, x, monkeypatch=monkeypatch)
    assert "library.pack_conv" in text
    assert "library.packed_conv" in text
    assert "library.rows_nt" in text
    with torch.no_grad():
        net[3].weight.mul_(2)
        torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-4)
        net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()})
        torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-4)


@mkldnn
def test_a_large_convolution_over_one_axis_is_not_packed(monkeypatch):
    net, x = torch.nn.Conv1d(256, 256, 3, 2), random(2, 256, 99)
    text, run = lowered(net, x, monkeypatch=monkeypatch)
    assert "pack_conv" not in text
    with torch.no_grad():
        torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-4)


@mkldnn
def test_weights_are_packed_where_they_are_used(net, monkeypatch):
    names = [f"{packed}_{kind}" for packed in ("pack", "packed") for kind in ("conv", "linear")]
    before = [function(name).same_as for name in names]
    x = random(1, 64, 9, 9)
    given = random(96, 64)
    with packed_at_use([*net.parameters(), given]), packed_at_use([]):
        _, run = lowered(net, x, monkeypatch=monkeypatch)
        held = function("pack_linear")(*passed(given, tvm_ffi.Shape((1, 120))))
        assert isinstance(held, tvm_ffi.Array)
        with torch.no_grad():
            torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-4)
        y = torch.from_dlpack(function("packed_linear")(*passed(random(0, 64)), held))
        assert y.shape == (0, 96)
    assert all(same(function(name)) for name, same in zip(names, before, strict=True))


@mkl
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_products_packed_by_mkl(turned, biased):
    x, weight, bias = random(4, 30, 64), random(96, 64), [random(96)] if biased else []
    given = weight if turned else weight.t().contiguous()
    held = function("pack_linear_mkl")(*passed(given, tvm_ffi.Shape((int(turned), 120))))
    packed, sizes = function("packed_linear_mkl"), tvm_ffi.Shape((120, 96, 64))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):  # which need not be as many as packed it
            torch.set_num_threads(threads)
            made = torch.from_dlpack(packed(*passed(x), held, *passed(*bias), sizes))
            torch.testing.assert_close(made, torch.nn.functional.linear(x, weight, *bias))
    finally:
        torch.set_num_threads(before)
    for other in (random(119, 64), random(120, 63), random(64)):
        with pytest.raises(RuntimeError, match="does not take"):
            packed(*passed(other), held, *passed(*bias), sizes)


@mkl
def test_which_products_mkl_packs(monkeypatch):
    monkeypatch.setattr(packing, "_is_intel", lambda: True)

    def found(size, rows):
        return lowered(torch.nn.Linear(*size), random(*rows, size[0]), monkeypatch=monkeypatch)

    for size, rows in [((300, 256), (64,)), ((256, 300), (2, 200)), ((256, 300), (512,))]:
        assert "library.packed_linear_mkl" in found(size, rows)[0]
    for size, rows in [((300, 256), (8,)), ((256, 300), (513,)), ((250, 256), (64,))]:
        assert "library.pack" not in found(size, rows)[0]


@mkl
def test_a_changed_weight_is_packed_anew_by_mkl(monkeypatch):
    monkeypatch.setattr(packing, "_is_intel", lambda: True)
    net = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.GELU(), torch.nn.Linear(400, 300))
    x = random(70, 300)
    text, run = lowered(net, x, monkeypatch=monkeypatch)
    assert text.count("library.packed_linear_mkl") == 2
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(0.5)
        torch.testing.assert_close(run(x), net(x))


@mkldnn
def test_a_wide_product_is_packed_for_many_rows_only(monkeypatch):
    monkeypatch.setattr(packing, "_is_intel", lambda: False)
    linear = torch.nn.Linear(728, 1456)
    assert "library.packed_linear" in lowered(linear, random(64, 728), monkeypatch=monkeypatch)[0]
    assert "library.rows_nt" in lowered(linear, random(8, 728), monkeypatch=monkeypatch)[0]
    narrow = lowered(torch.nn.Linear(1456, 728), random(64, 1456), monkeypatch=monkeypatch)[0]
    assert "library.matmul_nt" in narrow


@mkldnn
@half
@pytest.mark.parametrize("dynamic", [False, True])
def test_autocast_takes_packed_products_and_their_bias(dynamic, monkeypatch):
    net = torch.nn.Sequential(
        torch.nn.Linear(160, 192), torch.nn.Tanh(), torch.nn.Linear(192, 128, bias=False)
    )
    x = random(6, 160)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.autocast("cpu", torch.bfloat16):
        text, run = lowered(net, x, monkeypatch=monkeypatch)
        assert text.count("library.packed_linear") == 2
        assert "library.matmul" not in text
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(0.5)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(run(x), net(x), rtol=0, atol=0)


@mkldnn
def test_a_weight_of_two_products_is_packed_once(monkeypatch):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(random(1456, 728))

        def forward(self, a, b):
            linear = torch.nn.functional.linear
            return linear(a, self.weight), linear(b, self.weight), self.weight.sum()

    text, _ = lowered(Twice(), random(64, 728), random(80, 728), monkeypatch=monkeypatch)
    assert text.count("library.pack_linear") == 1
    assert text.count("library.packed_linear") == 1
    assert "library.matmul_nt" in text


@mkldnn
def test_where_nothing_is_packed(net, monkeypatch):
    x = random(1, 64, 9, 9)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "leaves_room_for", lambda size: size < 1000)
        assert "library.pack" not in lowered(net, x, monkeypatch=patch)[0]
    torch._C._set_mkldnn_enabled(False)  # flags() warns of TF32 on the way
    try:
        assert "library.pack" not in lowered(net, x, monkeypatch=monkeypatch)[0]
    finally:
        torch._C._set_mkldnn_enabled(True)
    torch.use_deterministic_algorithms(True)
    try:
        assert "library.pack" not in lowered(net, x, monkeypatch=monkeypatch)[0]
    finally:
        torch.use_deterministic_algorithms(False)
    grouped = torch.nn.Conv2d(256, 256, 3, groups=256)
    assert "library.pack" not in lowered(grouped, random(1, 256, 9, 9), monkeypatch=monkeypatch)[0]
    turned = torch.nn.ConvTranspose2d(128, 128, 3)
    assert "library.pack" not in lowered(turned, random(1, 128, 9, 9), monkeypatch=monkeypatch)[0]
    double = net.double()
    assert "library.pack" not in lowered(double, x.double(), monkeypatch=monkeypatch)[0]


def test_without_the_helper_or_the_library_there_are_no_native_calls(net, monkeypatch):
    x = random(1, 64, 9, 9)
    monkeypatch.setattr(packing.native, "use", lambda: False)
    text, _ = lowered(net, x, monkeypatch=monkeypatch)
    assert "library.matmul_nt" in text
    assert "library.new_conv" not in text
    assert "library.pack" not in text


def test_switched_off_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert compiled.load("native", native._SOURCES) is None


def test_library_none_has_no_packed_call():
    torch._dynamo.reset()
    linear = torch.nn.Linear(728, 1456)
    run = torch.compile(linear, backend="relax", options={"library": "none"})
    x = random(4, 728)
    with torch.no_grad():
        torch.testing.assert_close(run(x), linear(x), rtol=1e-4, atol=1e-4)


def test_training_packs_nothing_and_learns():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(64, 128, 3), torch.nn.Flatten(), torch.nn.Linear(1152, 4)
    )
    assert_matches_eager(net, random(2, 64, 5, 5), grad=True)


def test_calls_are_counted():
    from fx2relax import report

    torch._dynamo.reset()
    before = report.counters.library_calls
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(72, 4))
    with torch.no_grad():
        torch.compile(net, backend="relax")(random(1, 3, 5, 5))
    assert report.counters.library_calls - before == 2
