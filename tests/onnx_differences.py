"""Where ONNX's reference evaluator or TVM's ONNX importer differs: who is right, and why.

By operator of `op_db`, then by side: ``"reference"``, ``"tvm"``, ``"both"`` where the exported
model itself says something else than the operator, or ``"ours"`` where our import refuses. PyTorch
is right throughout: ONNX's specification says the same, or the exporter wrote another model.
"""

from __future__ import annotations

from opinfo.onnx import SIDES, OnnxOutcome

_DRAWS = "each side draws its own random numbers, and ONNX's operators know no generator of PyTorch"
_DTYPE = "the exporter casts the result to float64, PyTorch the operand: digits are missing"
_DIVISOR = "the exporter leaves divisor_override out: ONNX's AveragePool has no such attribute"
_TRAINING = "the exporter writes BatchNormalization for inference, without training_mode"
_INDICES = "the evaluator's MaxPool gives 0 for each index where the kernel has one element"
_KEEPDIM = "the exporter leaves keepdim out of a norm over all axes"
_LOST = "TVM's ReduceMax and ReduceMin lose a NaN that other values follow"
_SCALE = "TVM's Resize takes the sizes' ratio for the scale, which the model gives as a number"

_INFINITE = "TVM's ArgMax and ArgMin give -1 where every value is the worst infinity"

DIFFERENCES: dict[str, dict[str, str]] = {
    "_upsample_bilinear2d_aa": {
        "reference": "with align_corners PyTorch still centres the filter at (i + 0.5) * scale,"
        " ONNX's Resize at i * scale: the exporter writes another model",
        "tvm": "TVM's Resize takes no notice of antialias",
    },
    "_native_batch_norm_legit": {"both": _TRAINING},
    "argwhere": {"tvm": "TVM's NonZero takes a 0-d tensor for one of one axis"},
    "as_strided.partial_views": {
        "ours": "reads memory outside the tensor that the function is given, and is refused"
    },
    "cauchy": {"both": _DRAWS},
    "cdist": {
        "both": "TorchScript's exporter (the other has none) writes sum((x - y) ** p) ** (1 / p)"
        " without the absolute value, for p = 0 as well"
    },
    "exponential": {"both": _DRAWS},
    "geometric": {"both": _DRAWS},
    "linalg.norm.subgradients_at_zero": {"both": _KEEPDIM},
    "log_normal": {"both": _DRAWS},
    "log_softmax.with_dtype": {"both": _DTYPE},
    "masked.amax": {"tvm": _LOST},
    "masked.amin": {"tvm": _LOST},
    "masked.argmax": {"tvm": _INFINITE},
    "masked.argmin": {"tvm": _INFINITE},
    "masked_select": {
        "ours": "torch.export asserts that at most as many are selected as the tensor has, where"
        " the mask is larger too; PyTorch's own run of its program raises the same"
    },
    "native_batch_norm": {"both": _TRAINING},
    "native_layer_norm": {
        "tvm": "TVM's LayerNormalization gives 0-d tensors for the mean and the deviation"
    },
    "nn.functional.avg_pool1d": {
        "reference": "with ceil_mode the evaluator's AveragePool spreads the rest of the last"
        " window over both ends, and every window lies elsewhere; TVM's agrees with PyTorch"
    },
    "nn.functional.avg_pool2d": {"both": _DIVISOR},
    "nn.functional.avg_pool3d": {"both": _DIVISOR},
    "nn.functional.batch_norm": {"both": _TRAINING},
    "nn.functional.grid_sample": {
        "reference": "the evaluator's GridSample clips the point itself, not each of the 16"
        " neighbours of bicubic interpolation, to the border; TVM's agrees with PyTorch"
    },
    "nn.functional.interpolate.bicubic": {"tvm": _SCALE},
    "nn.functional.interpolate.bilinear": {"tvm": _SCALE},
    "nn.functional.interpolate.nearest": {"tvm": _SCALE},
    "nn.functional.interpolate.trilinear": {"tvm": _SCALE},
    "nn.functional.max_pool1d": {"reference": _INDICES},
    "nn.functional.max_pool2d": {"reference": _INDICES},
    "nn.functional.max_pool3d": {"reference": _INDICES},
    "nn.functional.upsample_bilinear": {
        "reference": "with align_corners the evaluator takes 1.7 * 4 for the length of a result"
        " of 6 values, the specification these 6; TVM's agrees with PyTorch"
    },
    "nn.functional.upsample_nearest": {"tvm": _SCALE},
    "nn.functional.rrelu": {"both": _DRAWS},
    "nn.functional.softmin.with_dtype": {"both": _DTYPE},
    "nonzero": {"tvm": "TVM's NonZero takes a 0-d tensor for one of one axis"},
    "normal.number_mean": {"both": _DRAWS},
    "randint": {"both": _DRAWS},
    "randn": {"both": _DRAWS},
    "softmax.with_dtype": {"both": _DTYPE},
    "special.log_ndtr": {
        "both": "the exporter writes log(ndtr(x)), which underflows where PyTorch's does not"
    },
}


def unexplained(outcome: OnnxOutcome) -> list[str]:
    """What the table does not explain: differences of the other sides, and refusals of ours."""
    known = DIFFERENCES.get(outcome.op, {})
    found = [
        f"{side}: {text}"
        for side in SIDES
        if side not in known and "both" not in known
        for text in outcome.differing(side)
    ]
    ours = [t for t in outcome.wrong if "ours" not in known or ": differs: " in t]
    return found + [f"ours: {text}" for text in ours]
