"""The transforms of lowered functions as one: what is packed for several of them is packed once."""

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from sharing_cases import arrays, machine, module, tensors, values
from tvm import relax

from fx2relax import pipeline
from fx2relax.pipeline import SharedWeightsError, lift_weights, lower, merge_transforms
from fx2relax.runtime import native

op = relax.op
WEIGHTS = {"up.weight": (256, 64), "down.weight": (64, 256), "up.bias": (256,), "scale": (64,)}


def block(s, x, up, down, bias, scale):
    """Half a transformer layer."""
    mean = s.mean(op.mean(op.multiply(x, x), axis=[-1], keepdims=True))
    norm = s.norm(op.multiply(s.unit(op.multiply(x, s.root(op.rsqrt(mean)))), scale))
    inner = s.inner(op.add(s.up(op.matmul(norm, s.up_t(op.permute_dims(up)))), bias))
    return op.add(x, s.down(op.matmul(s.relu(op.nn.relu(inner)), s.down_t(op.permute_dims(down)))))


def model(shapes, weights=WEIGHTS, body=block):
    """The same block for several shapes of its input, by function name."""
    made = {name: module({name: body}, weights, x=x)[name] for name, x in shapes.items()}
    return tvm.IRModule(made)


SHAPES = {"prefill": (16, 64), "decode": (1, 64), "any": ("rows", 64)}


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


def checked(mod, merged, places, given):
    """Each function gives the same as before; what the merged transform returned."""
    virtual = relax.VirtualMachine(pipeline.assemble(merged), tvm.cpu())
    made = virtual["transform_params"](tensors(given))
    old = machine(mod)
    for name, func in mod.functions_items():
        first, *_ = func.params
        rows = [int(n) if not isinstance(n, tvm.tirx.Var) else 7 for n in first.ty.shape.values]
        (x,) = values([rows], seed=5)
        wanted = arrays(old[name.name_hint](*tensors([x, *given])))
        weights = [made[n] for n in places[name.name_hint]]
        got = arrays(virtual[name.name_hint](*tensors([x]), *weights))
        for a, b in zip(wanted, got, strict=True):
            close(a, b)
    return made


@pytest.mark.sweep(6)
@pytest.mark.parametrize("before", [None, True, False])
def test_prefill_and_decode_share_one_packed_copy(before):
    mod = model(SHAPES)
    given = mod if before is None else lift_weights(mod, before).mod
    lowered = lower(given, library="none", lift_weights=True)
    merged, places = merge_transforms(lowered)
    assert places["prefill"] == places["decode"] == places["any"]
    made = checked(mod, merged, places, values(WEIGHTS.values()))
    shapes = sorted(tuple(t.shape) for t in made)
    packed = [s for s in shapes if len(s) == 3]
    assert len(packed) == 2, "one packed copy of each matrix"
    lanes = packed[0][-1]  # the processor's
    assert packed == [(64 // lanes, 256, lanes), (256 // lanes, 64, lanes)] or before is not None
    assert sum(np.prod(s) for s in shapes) == sum(np.prod(s) for s in WEIGHTS.values())
    names = [g.name_hint for g in merged.get_global_vars()]
    assert [n for n in names if "transform" in n] == ["transform_params"]
    packs = [n for n in names if n.startswith("pack")]
    assert len(packs) == 2


def test_a_function_without_a_transform_takes_the_weights():
    def other(s, x, up, down, bias, scale):
        return op.add(x, scale)

    bodies = {"decode": block, "shift": other}
    mod = module(bodies, WEIGHTS, x=(1, 64))
    merged, places = merge_transforms(lower(mod, library="none", lift_weights=True))
    made = checked(mod, merged, places, values(WEIGHTS.values()))
    taken = {name: [tuple(made[n].shape) for n in where] for name, where in places.items()}
    assert (64,) in taken["shift"]
    assert taken["decode"].count((64,)) == 1
    assert len({n for where in places.values() for n in where}) == len(made)


def test_nothing_to_merge():
    mod = module({"main": lambda s, x, w: op.add(x, w)}, {"w": (8,)})
    lowered = lower(mod, library="none", lift_weights=True)
    merged, places = merge_transforms(lowered)
    assert merged is lowered
    assert places == {}


def test_passed_weights_are_not_copied():
    mod = model(SHAPES)
    merged, places = merge_transforms(
        lower(lift_weights(mod).mod, library="none", lift_weights=True)
    )
    virtual = relax.VirtualMachine(pipeline.assemble(merged), tvm.cpu())
    given = tensors(values(WEIGHTS.values()))
    made = virtual["transform_params"](given)
    addresses = {np.from_dlpack(t).ctypes.data for t in given}
    kept = [t for t in made if np.from_dlpack(t).ctypes.data in addresses]
    assert [tuple(t.shape) for t in kept] == [(256,), (64,)]
    assert len(places) == 3


def test_symbolic_weights():
    def body(s, x, w, v):
        joined = s.joined(op.concat([w, v], axis=0))
        y = s.y(op.matmul(x, s.joined_t(op.permute_dims(joined))))
        return op.reshape(y, [y.ty.shape[0], 2, w.ty.shape[0]])

    weights = {"w": ("n", 8), "v": ("n", 8)}
    mod = model({"prefill": (16, 8), "any": ("rows", 8)}, weights, body)
    shared = lift_weights(mod)
    assert shared.weights("any") == ["weight_sizes", "joined_t"]
    for given in (mod, shared.mod, lift_weights(mod, False).mod):
        lowered = lower(given, library="none", lift_weights=True)
        merged, places = merge_transforms(lowered)
        if places:
            checked(mod, merged, places, values([(3, 8), (3, 8)]))


def test_other_weights_are_an_error():
    one = model({"prefill": (16, 64)})
    fewer = {"up.weight": (64, 64)}
    other = model({"other": (4, 64)}, fewer, lambda s, x, w: op.matmul(x, s.t(op.permute_dims(w))))
    mod = tvm.IRModule({"prefill": one["prefill"], "other": other["other"]})
    lowered = lower(mod, library="none", lift_weights=True)
    with pytest.raises(SharedWeightsError, match="take different weights"):
        merge_transforms(lowered)


def test_ahead_of_time():
    def both(s, x, *weights):
        return relax.Tuple([s.out(block(s, x, *weights))])

    mod = model({"prefill": (16, 64), "decode": (1, 64)}, body=both)
    ready, places = merge_transforms(lower(mod, library="none", lift_weights=True))
    for name in ("prefill", "decode"):
        ready, _ = pipeline.give(ready, name, 1)
    code = pipeline.library_code(ready)
    assert code is not None
    assert b"transform_params" in code
    given = values(WEIGHTS.values())
    virtual = relax.VirtualMachine(pipeline.machine_code(ready), tvm.cpu())
    made = virtual["transform_params"](tensors(given))
    (x,) = values([(1, 64)])
    out = tensors([np.zeros((1, 64), "float32")])
    virtual["decode"](*tensors([x]), *[made[n] for n in places["decode"]], *out)
    wanted = arrays(machine(mod)["decode"](*tensors([x, *given])))
    close(out[0].numpy(), wanted[0])


@pytest.mark.skipif(not native.use(), reason="no C++ compiler")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
def test_packed_objects_of_the_library():
    """Weights that oneDNN packs are packed for a number of rows, and shared for that one alone."""

    def wide(s, x, w):
        return op.matmul(x, s.w_t(op.permute_dims(w)))

    shapes = {"one": (64, 728), "same": (64, 728), "other": (80, 728)}
    mod = model(shapes, {"w": (1456, 728)}, wide)
    merged, places = merge_transforms(lower(mod, library="torch", lift_weights=True))
    assert places["one"] == places["same"] != places["other"]
    assert merged["transform_params"].script().count("pack_linear") == 2
    virtual = relax.VirtualMachine(pipeline.assemble(merged), tvm.cpu())
    x, w = values([(80, 728), (1456, 728)])
    made = virtual["transform_params"](tensors([w]))
    for name, (rows, _) in shapes.items():
        result = virtual[name](*tensors([x[:rows]]), *[made[n] for n in places[name]])
        close(arrays(result)[0], x[:rows] @ w.T)


def test_the_transform_is_the_same_whoever_is_first():
    first = merge_transforms(lower(model(SHAPES), library="none", lift_weights=True))
    turned = dict(reversed(SHAPES.items()))
    second = merge_transforms(lower(model(turned), library="none", lift_weights=True))
    assert first[1] == second[1]
    assert tvm_ffi.structural_equal(
        first[0]["transform_params"].ret_ty, second[0]["transform_params"].ret_ty
    )
