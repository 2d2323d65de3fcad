"""Work on weights that PyTorch does, so that no kernel is compiled for it."""

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn

import fx2relax
from fx2relax import pipeline
from fx2relax.compat import op, relax
from fx2relax.pipeline.on_weights import shortened, use_library_on_weights
from fx2relax.runtime import on_weights
from fx2relax.runtime.on_weights import PREFIX

TRANSFORM = "main_transform_params"


def made_once(sizes, dtype, build, result=None):
    """A transform of one weight, as `lift` writes it."""
    builder = relax.BlockBuilder()
    given = relax.Var("params", relax.TupleType([relax.TensorType(sizes, dtype)]))
    with builder.function(TRANSFORM, [given]):
        with builder.dataflow():
            weight = builder.emit(relax.TupleGetItem(given, 0))
            out = builder.emit_output(relax.Tuple([builder.emit(build(weight))]))
        builder.emit_func_output(out)
    return builder.get()


def packed(mod):
    """What a transform calls, in order."""
    values = [b.value for block in mod[TRANSFORM].body.blocks for b in block.bindings]
    calls = [v for v in values if getattr(getattr(v, "op", None), "name", "").endswith("_packed")]
    return [str(call.args[0].global_symbol).removeprefix(PREFIX) for call in calls]


def computed(mod, weight):
    """What a transform makes of a weight, through the whole of `lower`."""
    lowered = pipeline.lower(mod, lift_weights=True)
    kernels = [f for _, f in lowered.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    machine = relax.VirtualMachine(pipeline.assemble(lowered), tvm.cpu())
    (result,) = machine[TRANSFORM]((tvm_ffi.from_dlpack(weight),))
    return torch.from_dlpack(result), len(kernels)


CASES = {
    "add": (lambda w: op.add(w, relax.const(0.1, "float32")), lambda w: w + 0.1),
    "subtract": (lambda w: op.subtract(relax.const(0.1, "float32"), w), lambda w: 0.1 - w),
    "multiply": (lambda w: op.multiply(w, w), lambda w: w * w),
    "divide": (lambda w: op.divide(relax.const(1.0, "float32"), w), lambda w: 1 / w),
    "negative": (op.negative, torch.neg),
    "sqrt": (op.sqrt, torch.sqrt),
    "broadcast": (lambda w: op.broadcast_to(w, [2, 3, 5]), lambda w: w.expand(2, 3, 5)),
    "half": (lambda w: op.astype(w, "bfloat16"), lambda w: w.bfloat16()),
    "reversed": (op.permute_dims, torch.t),
    "moved": (lambda w: op.permute_dims(w, [-1, 0]), torch.t),
    "reshaped": (lambda w: op.reshape(op.reshape(w, [5, 3]), [15]), torch.flatten),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_pytorchs_and_no_kernel_is_made(name):
    build, eager = CASES[name]
    weight = torch.randn(3, 5)
    weight[0, :3] = torch.tensor([0.0, float("nan"), float("inf")])
    result, kernels = computed(made_once([3, 5], "float32", build), weight)
    assert kernels == 0
    torch.testing.assert_close(result, eager(weight), rtol=0, atol=0, equal_nan=True)


def test_operands_are_read_as_they_were_reshaped():
    def build(weight):
        return op.multiply(op.reshape(weight, [6, 1]), op.reshape(weight, [1, 6]))

    mod = made_once([6], "float32", build)
    called = use_library_on_weights(mod)
    assert packed(called) == ["multiply"]
    assert "reshape" not in called[TRANSFORM].script()
    weight = torch.randn(6)
    result, kernels = computed(mod, weight)
    assert kernels == 0
    assert torch.equal(result, weight.reshape(6, 1) * weight)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_each_dtype_rounds_as_eager(dtype):
    def build(weight):
        return op.divide(op.add(op.multiply(weight, weight), weight), weight)

    weight = torch.randn(64, dtype=getattr(torch, dtype))
    result, kernels = computed(made_once([64], dtype, build), weight)
    assert kernels == 0
    assert torch.equal(result, (weight * weight + weight) / weight)


def test_other_work_stays_a_kernel():
    def build(weight):
        return op.multiply(op.exp(weight), weight)

    weight = torch.randn(7)
    result, kernels = computed(made_once([7], "float32", build), weight)
    assert kernels == 1
    torch.testing.assert_close(result, weight.exp() * weight)


def test_integers_stay_a_kernel():
    mod = made_once([4], "int32", lambda w: op.add(w, w))
    assert packed(use_library_on_weights(mod)) == []
    result, kernels = computed(mod, torch.arange(4, dtype=torch.int32))
    assert kernels == 1
    assert result.tolist() == [0, 2, 4, 6]


def test_sizes_that_are_symbols_stay_a_kernel():
    n = tvm.tirx.Var("n", "int64")
    mod = made_once([n], "float32", lambda w: op.add(w, w))
    assert packed(use_library_on_weights(mod)) == []


def test_only_transforms_without_kernels_are_put_aside():
    alone = use_library_on_weights(made_once([3], "float32", lambda w: op.add(w, w)))
    left, finished = shortened(alone)
    assert packed(left) == []
    assert packed(finished) == ["add"]
    assert packed(alone) == ["add"], "the module is not changed"
    mixed = use_library_on_weights(made_once([3], "float32", op.exp))
    left, finished = shortened(mixed)
    assert not finished.functions
    assert left.functions == mixed.functions


class Normed(nn.Module):
    def __init__(self, conv, channels, rank):
        super().__init__()
        self.conv = conv
        self.norm = getattr(nn, f"BatchNorm{rank}d")(channels)
        nn.init.uniform_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


NETS = {
    "convolution": (lambda: Normed(nn.Conv2d(4, 8, 3), 8, 2), (2, 4, 9, 9)),
    "groups, no bias": (
        lambda: Normed(nn.Conv2d(4, 8, 3, groups=2, bias=False), 8, 2),
        (1, 4, 9, 9),
    ),
    "transposed": (lambda: Normed(nn.ConvTranspose2d(4, 6, 3, groups=2), 6, 2), (1, 4, 5, 5)),
    "one axis": (lambda: Normed(nn.Conv1d(3, 5, 3), 5, 1), (2, 3, 20)),
    "three axes": (lambda: Normed(nn.Conv3d(2, 4, 2), 4, 3), (1, 2, 5, 5, 5)),
}


def lowered_net(name, library):
    make, sizes = NETS[name]
    torch.manual_seed(0)
    model = make().eval()
    mod = fx2relax.from_fx(torch.fx.symbolic_trace(model), [(sizes, "float32")])
    return model, torch.randn(sizes), pipeline.lower(mod, library=library, lift_weights=True)


@pytest.mark.parametrize("name", NETS)
def test_batch_norms_are_folded_without_a_kernel(name, fresh):
    model, x, lowered = lowered_net(name, "torch")
    transform = lowered[TRANSFORM].script()
    assert "call_tir" not in transform
    assert f"{PREFIX}multiply" in transform
    with torch.inference_mode():
        compiled = torch.compile(model, backend="relax", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_program_for_other_processes_has_kernels():
    _, _, lowered = lowered_net("convolution", "none")
    assert PREFIX not in lowered.script()


def test_every_function_is_registered():
    for name in on_weights.FUNCTIONS:
        assert tvm_ffi.get_global_func(PREFIX + name, allow_missing=True) is not None
