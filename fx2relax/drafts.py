"""From an ATen graph to a program: imported, lowered, compiled, and what is kept of it on disk."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._guards import detect_fake_mode

from fx2relax import cache, devices, disk, objects, pipeline, registry, report, stages
from fx2relax.calling import Calling
from fx2relax.errors import target_name
from fx2relax.gpu_rewrites import rewritten
from fx2relax.graph_key import versions
from fx2relax.imported import Imported
from fx2relax.importer import import_graph
from fx2relax.literals import NoSpelling
from fx2relax.options import Options
from fx2relax.outputs import OutputSpec
from fx2relax.params import InputSpec
from fx2relax.registry import shipped
from fx2relax.runtime.loading import load
from fx2relax.shapes import SymbolTable
from fx2relax.stored import record

log = logging.getLogger("fx2relax")

#: What the name of a tuned program begins with; the rest is what `pipeline.lower` calls its way.
TUNED = "tuned "


@dataclass
class Built:
    """A program that can be run.

    Attributes:
        imported: what the runtime has to know of it.
        executable: what a `relax.VirtualMachine` runs.
        calling: how its function is called.
        census: how many kernels and library calls it has, see `pipeline.census`.
        draft: what it was compiled from; None where it was found compiled.
        kernels: what it calls, in order, as profilers show it: see `kernel_names.shown`.
        found: whether it was found on disk.
    """

    imported: Imported
    executable: Any
    calling: Calling
    census: dict[str, int]
    draft: Draft | None = None
    kernels: Sequence[tuple[str, str]] = ()
    found: bool = False


@dataclass
class _Low:
    """A draft that was lowered.

    Attributes:
        mod: what machine code is made of.
        calling: see `Built`, as for the next two.
        census: the same.
        kernels: the same.
        checked: whether its kernels look at their arguments.
        way: what is stored as the way it was compiled in.
    """

    mod: Any
    calling: Calling
    census: dict[str, int]
    kernels: Sequence[tuple[str, str]]
    checked: bool
    way: str


@dataclass
class Draft:
    """A graph that was imported, to be compiled in one way or another.

    Attributes:
        imported: the Relax module, and what the runtime has to know.
        said: what is stored of it; None where it cannot be.
        told: what the importer told of it.
        device: where its tensors are.
    """

    imported: Imported
    said: dict[str, Any] | None
    told: dict[str, Any]
    device: torch.device = devices.CPU

    def compile(
        self,
        library: str,
        store: cache.Store | None,
        key: str,
        *,
        workers: int = 2,
        checkpoint: Callable[[], None] = lambda: None,
        known: Callable[[Any, Any], Any] | None = None,
    ) -> Built:
        """Compile it, and keep the program where there is a store.

        Args:
            library: one of `pipeline.lower`'s.
            store: where it is kept.
            key: by which.
            workers: how many kernels are compiled at a time.
            checkpoint: called now and then; what it raises is raised.
            known: the schedules of kernels that were tuned, see `pipeline.lower`.

        Raises:
            what `pipeline.lower`, `pipeline.machine_code` and `checkpoint` raise.
        """
        low = self._lowered(library, checkpoint, known)
        executable = None
        if store is not None and self.said is not None:
            executable = self._stored(low, store, key, workers, checkpoint)
        if executable is None and objects.held(low.mod):
            # Objects of the user's are linked, and only a library is.
            code = self._library(low, workers, checkpoint)
            assert code is not None
            executable = load(code, self.device.type)
        if executable is None:
            with stages.timed("compile kernels"):
                target = devices.facts(self.device)
                executable = pipeline.machine_code(low.mod, target=target, checked=low.checked)
        return Built(self.imported, executable, low.calling, low.census, self, low.kernels)

    def entry(self, library: str, workers: int) -> cache.Entry | None:
        """What is stored of it, compiled as `compile` does, for another process to load.

        Args:
            library: see `compile`, as for the other.
            workers: the same.

        Returns:
            None where it cannot be stored, or there is no linker.

        Raises:
            what `compile` raises.
        """
        if self.said is None:
            return None
        uninterrupted = lambda: None  # noqa: E731
        low = self._lowered(library, uninterrupted, None)
        code = self._library(low, workers, uninterrupted)
        return None if code is None else self._entry(low, code)

    def _lowered(
        self,
        library: str,
        checkpoint: Callable[[], None],
        known: Callable[[Any, Any], Any] | None,
    ) -> _Low:
        imported, target = self.imported, devices.facts(self.device)
        lifted = imported.num_input < len(imported.params)
        checkpoint()
        with stages.timed("lower"), stages.kept("legal", "grouped") as noted:
            lowered = pipeline.lower(
                imported.mod,
                target=target,
                library=library,
                lift_weights=lifted,
                known=known,
            )
        way = library if known is None else TUNED + library
        checkpoint()
        census = pipeline.census(lowered)
        leading = imported.num_input + bool(imported.solved)
        with stages.timed("plan memory"):
            gpu = self.device.type != "cpu"
            into = {} if gpu else changing(imported)
            ready, calling = pipeline.give(lowered, imported.name, leading, into, gpu)
        stages.note("lowered", mod=lowered, ready=ready, library=way, name=imported.name)
        with stages.timed("name kernels"):
            kernels = self._kernels(noted, lowered, ready)
        # The boundary hands over compact tensors, and the virtual machine looks at their sizes;
        # nothing does where a kernel is called past it. What PyTorch returns inside a program may
        # be of another size than its meta function says.
        checked = bool(imported.torch_calls) or calling.kernel is not None
        return _Low(ready, calling, census, kernels, checked, way)

    def _library(self, low: _Low, workers: int, checkpoint: Callable[[], None]) -> bytes | None:
        with stages.timed("compile kernels"):
            return pipeline.library_code(
                low.mod,
                target=devices.facts(self.device),
                checked=low.checked,
                workers=workers,
                checkpoint=checkpoint,
            )

    def _entry(self, low: _Low, code: bytes) -> cache.Entry:
        assert self.said is not None
        said = {
            **self.said,
            "calling": low.calling.spelled(),
            "census": low.census,
            "kernels": low.kernels,
        }
        about = {
            **versions(),
            "made": time.time(),
            "library": low.way,
            "operators": self.imported.nodes,
            "kernels": low.census,
        }
        return cache.Entry(code, said, about)

    def _stored(
        self,
        low: _Low,
        store: cache.Store,
        key: str,
        workers: int,
        checkpoint: Callable[[], None],
    ) -> Any:
        """Compile to a library, load it and keep it; None where it cannot be linked or loaded."""
        try:
            code = self._library(low, workers, checkpoint)
        except pipeline.LinkError as error:
            log.warning("a program is not stored: %s", error)
            return None
        except OSError as error:
            disk.warn_unusable(error)
            return None
        if code is None:
            return None
        try:
            executable = loaded(code, self.device)
        except NotLoaded as error:
            disk.warn_unusable(error)
            return None
        store.put(key, self._entry(low, code))
        stages.note("cache", event="stored", key=key)
        return executable

    def _kernels(
        self, noted: dict[str, list[dict[str, Any]]], lowered: Any, ready: Any
    ) -> list[tuple[str, str]]:
        # Only what compiles needs it: a warm start runs without TVM's compiler.
        from fx2relax import kernel_names

        try:
            legal, grouped = (noted[stage][-1]["mod"] for stage in ("legal", "grouped"))
            return kernel_names.shown(self.told, legal, grouped, lowered, ready)
        except Exception as error:  # a program runs without names
            log.info("a profiler will not show kernels: %s: %s", type(error).__name__, error)
            return []


def draft_of(
    graph: torch.fx.GraphModule, specs: Sequence[InputSpec], options: Options, stored: bool
) -> Draft:
    """Import a graph; raises what `import_graph` raises.

    Args:
        graph: see `build`.
        specs: the same.
        options: the same.
        stored: whether what is compiled of it may be kept.
    """
    sizes, device = Sizes(graph), devices.of_graph(graph)
    if device.type == "cuda" and options.library != "none":
        graph = rewritten(graph, specs)
    with (
        registry.watched() as used,
        stages.timed("import"),
        stages.kept("imported") as noted,
    ):
        imported = import_graph(
            graph,
            specs,
            symbols=SymbolTable(sizes.ranges),
            on_unsupported=options.on_unsupported,
            library="none" if options.library == "none" else "torch",
            output_strides=True,
            halves=True,
            fold=True,
        )
    stages.note("drafted", imported=imported)
    # Work on numbers alone is compiled while a graph is imported.
    told = next(what for what in noted["imported"] if what["graph"] is graph)
    if not stored:
        return Draft(imported, None, told, device)
    try:
        custom = [target_name(c.target) for c in used if not shipped(c)]
        if custom:
            raise NoSpelling("a converter of the user's")
        said = {"imported": record(imported, graph, specs), "guards": sizes.guards()}
    except NoSpelling as error:
        report.counters.skip_cache(str(error))
        return Draft(imported, None, told, device)
    return Draft(imported, said, told, device)


def changing(imported: Imported) -> dict[int, int]:
    """Results that are what is written to an input, as both lie: by place, the parameter's."""
    seen = Counter(spec.index for spec in imported.outputs if spec.kind in ("result", "view"))
    found = {}
    for place, given in enumerate(imported.params[: imported.num_input]):
        if given.written is None or given.permutation is not None or given.storage is not None:
            continue
        spec = imported.outputs[given.written]
        if spec == OutputSpec("result", spec.index) and seen[spec.index] == 1:
            found[spec.index] = place
    return found


class NotLoaded(OSError):
    """No folder at hand lets libraries be loaded."""


def loaded(library: bytes, device: torch.device) -> Any:
    """The executable that a library holds; raises NotLoaded."""
    try:
        return load(library, device.type)
    except Exception as error:
        raise NotLoaded(f"they cannot be loaded: {error}") from error


class Sizes:
    """What is known of a graph's symbolic sizes, and what compiling it makes certain of them."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        values = [n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"]
        mode = detect_fake_mode(values)
        self.env: Any = mode.shape_env if mode is not None else None
        self.symbolic = [v for v in values if isinstance(v, torch.SymInt)]
        self.before = self._state()

    @property
    def ranges(self) -> Any:
        """What Dynamo's guards make certain of the sizes."""
        return self.env.var_to_range if self.env is not None else None

    def _state(self) -> Any:
        env = self.env
        return None if env is None else (len(env.guards), dict(env.replacements))

    def guards(self) -> str | None:
        """What was decided by the sizes at hand since: the program holds for no others.

        Raises:
            NoSpelling: this PyTorch does not say it as text.
        """
        if self._state() == self.before:
            return None
        try:
            found = self.env.get_pruned_guards(self.symbolic)
            return str(self.env.produce_guards_expression(self.symbolic, guards=found))
        except Exception as error:
            raise NoSpelling("a decision by a symbolic size") from error

    def hold(self, guards: str | None) -> bool:
        """Whether a program's guards hold here too; Dynamo is then told of them."""
        if guards is None:
            return True
        return bool(self.env.evaluate_guards_expression(guards, self.symbolic))
