"""One model four ways: in eager, through our import, and as an ONNX model in two other hands.

Each side takes a list of tensors and returns a list of tensors.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.jit._trace import TracerWarning
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack

from fx2relax import pipeline
from fx2relax.compat import TVMTensor, from_onnx, from_torch, relax, tvm
from fx2relax.frontend import from_fx
from fx2relax.runtime import boundary

MISSING = (
    "assert_matches_onnx needs the packages onnx and onnxscript: pip install onnx onnxscript "
    "(both are in the extra fx2relax[test])"
)


def require_onnx() -> Any:
    """The package `onnx`.

    Raises:
        ImportError: it is not installed; the message says what to install.
    """
    try:
        import onnx
        import onnx.reference
    except ImportError as error:
        raise ImportError(MISSING) from error
    return onnx


class Flat(torch.nn.Module):
    """A model of the tensors among its arguments, in order, that returns the tensors alone."""

    def __init__(
        self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__()
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        rest = [None if isinstance(v, torch.Tensor) else (v,) for v in leaves]

        def arguments(tensors: Sequence[torch.Tensor]) -> Any:
            given = iter(tensors)
            found = [next(given) if value is None else value[0] for value in rest]
            return pytree.tree_unflatten(found, spec)

        # A function, which a copy of the module shares.
        self.arguments = arguments
        self.tensors_alone = not kwargs and len(args) == len(leaves) and not any(rest)
        self.model = model
        self.training = bool(getattr(model, "training", False))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`tensors` are as many as the arguments held."""
        args, kwargs = self.arguments(tensors)
        found = pytree.tree_leaves(self.model(*args, **kwargs))
        return tuple(t for t in found if isinstance(t, torch.Tensor))


def run_eager(model: Flat, inputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """What PyTorch computes, on copies of the inputs and of the model."""
    twin = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        return [t.detach().resolve_conj() for t in twin(*(t.clone() for t in inputs))]


def run_exact(model: Flat, inputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor] | None:
    """`run_eager` in float64 and complex128; None where PyTorch cannot."""

    def wide(t: torch.Tensor) -> torch.Tensor:
        kind = torch.complex128 if t.is_complex() else torch.float64
        return t.to(kind) if t.is_complex() or t.is_floating_point() else t

    try:
        return run_eager(copy.deepcopy(model).double(), [wide(t) for t in inputs], seed)
    except Exception:  # a dtype that is written out in the model, or no kernel for float64
        return None


def captured(model: Flat, inputs: Sequence[torch.Tensor]) -> Any:
    """The program of `torch.export`; where there is none, the graph of `fx.symbolic_trace`.

    Raises:
        Exception: what `torch.export` raised, where neither is to be had.
    """
    with torch.no_grad(), warnings.catch_warnings():
        # nn.LSTM holds its weights twice, by name and in a list; export warns about the list.
        warnings.filterwarnings("ignore", message="The tensor attributes? .*_flat_weights")
        try:
            return torch.export.export(copy.deepcopy(model), tuple(inputs))
        except Exception:
            if isinstance(model.model, torch.nn.Module) and model.tensors_alone:
                with contextlib.suppress(Exception):
                    return torch.fx.symbolic_trace(copy.deepcopy(model.model))
            raise


def run_ours(
    model: Flat, graph: Any, inputs: Sequence[torch.Tensor], seed: int, torch_calls: bool
) -> list[torch.Tensor]:
    """`from_fx`, then generated kernels only; `graph` is what `captured` gave for the model."""
    mod = from_fx(graph, list(inputs), on_unsupported="torch" if torch_calls else "raise")
    mod, params = relax.frontend.detach_params(mod)
    executable = pipeline.build(mod, library="none")
    main = mod["main"]
    count = int(main.attrs["num_input"]) if "num_input" in main.attrs else len(main.params)
    held = {**model.state_dict(), **getattr(model.model, "state_dict", dict)()}
    # Buffers that the model writes to stand beside its inputs.
    written = [held[p.name] for p in main.params[len(inputs) : count]]
    torch.manual_seed(seed)
    return _called(executable, [*inputs, *written], params.get("main", []))


@dataclass(frozen=True)
class OnnxModel:
    """An exported model.

    Attributes:
        proto: the `onnx.ModelProto`; its inputs are the model's tensors that it uses, in order.
        exporter: "dynamo" or "TorchScript".
        used: for each of its inputs, which of the model's it is.
    """

    proto: Any
    exporter: str
    used: tuple[int, ...]

    @property
    def opset(self) -> int:
        """The version of ONNX's own operator set."""
        return next(int(o.version) for o in self.proto.opset_import if o.domain in ("", "ai.onnx"))

    @property
    def operators(self) -> dict[str, int]:
        """How many nodes of each operator it has."""
        return dict(Counter(node.op_type for node in self.proto.graph.node))

    def given(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Its inputs among the model's; what is complex as pairs."""
        return [boundary.ready(inputs[i]) for i in self.used]


def to_onnx(
    model: Flat, inputs: Sequence[torch.Tensor], program: Any, exporter: str | None
) -> OnnxModel:
    """Export by the exporter over `torch.export`, and where that fails by TorchScript's.

    Args:
        model: what TorchScript's exporter runs.
        inputs: its tensors.
        program: what `captured` gave; None where it could not.
        exporter: "dynamo" or "TorchScript" for that one alone.

    Raises:
        Exception: what the first of the exporters tried raised.
    """
    first: Exception | None = None
    for name, export in (("dynamo", _by_dynamo), ("TorchScript", _by_torchscript)):
        if exporter not in (None, name):
            continue
        try:
            proto = export(model, inputs, program)
        except Exception as error:
            first = first or error
            continue
        initial = {t.name for t in proto.graph.initializer}
        names = [i.name for i in proto.graph.input if i.name not in initial]
        # TorchScript's exporter leaves out the inputs that the model does not use.
        used = tuple(range(len(names)))
        if name == "TorchScript":
            used = tuple(int(n.removeprefix(_NAME)) for n in names)
        return OnnxModel(proto, name, used)
    assert first is not None
    raise first


_NAME = "input_"


def _by_dynamo(model: Flat, inputs: Sequence[torch.Tensor], program: Any) -> Any:
    if not isinstance(program, torch.export.ExportedProgram):
        raise RuntimeError("torch.export cannot capture the model")
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING) from error
    with _quiet():
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported is not None
    return exported.model_proto


def _by_torchscript(model: Flat, inputs: Sequence[torch.Tensor], program: Any) -> Any:
    file = io.BytesIO()
    with torch.no_grad(), _quiet():
        torch.onnx.export(
            copy.deepcopy(model),
            tuple(t.clone() for t in inputs),
            file,  # type: ignore[arg-type]
            dynamo=False,
            verbose=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            input_names=[f"{_NAME}{i}" for i in range(len(inputs))],
        )
    return require_onnx().load_from_string(file.getvalue())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters say about themselves and about packages that are not there."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
            warnings.filterwarnings("ignore", category=category)
        # Python that looks at a value, which a trace takes for a constant.
        warnings.filterwarnings("ignore", category=TracerWarning)
        for module in (r"torch\.onnx\.", r"torch\.jit\.", r"onnxscript\.", r"onnx_ir\."):
            warnings.filterwarnings("ignore", category=UserWarning, module=module)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # a failing export prints its graph
                yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def run_reference(exported: OnnxModel, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The ONNX project's reference evaluator, in NumPy."""
    evaluator = require_onnx().reference.ReferenceEvaluator(exported.proto)
    arrays = [_to_numpy(t) for t in exported.given(inputs)]
    names = evaluator.input_names
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # log(0) and its like
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"onnx\.")
        found = evaluator.run(None, dict(zip(names, arrays, strict=False)))
    return [_from_numpy(value) for value in found]


def run_tvm(exported: OnnxModel, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """TVM's own importer, compiled by TVM's default pipeline, with no pass of ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"tvm\.")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it cannot convert
            mod = from_onnx(exported.proto)
        executable = relax.build(mod, target=tvm.target.Target("llvm"))
    return _called(executable, exported.given(inputs), [])


def _called(
    executable: Any, inputs: Sequence[torch.Tensor], weights: Sequence[Any]
) -> list[torch.Tensor]:
    machine = relax.VirtualMachine(executable, tvm.cpu())
    # Fresh memory: TVM is promised 64 bytes of alignment, and may not write to the caller's.
    given = [from_torch(boundary.ready(t.clone())) for t in inputs]
    found: list[torch.Tensor] = []
    _gather(machine["main"](*given, *weights), found)
    return found


def _gather(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value.clone())
    elif isinstance(value, TVMTensor):
        found.append(from_dlpack(value).clone())
    elif isinstance(value, (int, float)):
        found.append(torch.tensor(value))
    else:
        for item in value:
            _gather(item, found)


def _to_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes  # onnx's own dependency

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _from_numpy(value: Any) -> torch.Tensor:
    if value is None or isinstance(value, (list, tuple, dict)):
        raise TypeError(f"an output is a {type(value).__name__}")
    array = np.array(value)  # a copy; the evaluator gives NumPy scalars as well
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
