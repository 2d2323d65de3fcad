"""From an ATen graph to something that runs: compiled, or compiled before and kept on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._dynamo.convert_frame import compile_lock
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves

from fx2relax import cache, devices, disk, objects, pipeline, registry, report, stages
from fx2relax.calling import Calling
from fx2relax.errors import target_name
from fx2relax.graph_key import graph_key, versions
from fx2relax.imported import Imported
from fx2relax.importer import import_graph
from fx2relax.literals import NoSpelling
from fx2relax.options import Options
from fx2relax.params import InputSpec
from fx2relax.pipeline.threads import share_threads
from fx2relax.routes import shipped
from fx2relax.runtime import native
from fx2relax.runtime.loading import load
from fx2relax.shapes import SymbolTable
from fx2relax.stored import record, restore

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
    """

    imported: Imported
    executable: Any
    calling: Calling
    census: dict[str, int]
    draft: Draft | None = None
    kernels: Sequence[tuple[str, str]] = ()


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
            ready, calling = pipeline.give(lowered, imported.name, leading)
        stages.note("lowered", mod=lowered, ready=ready, library=way, name=imported.name)
        with stages.timed("name kernels"):
            kernels = self._kernels(noted, lowered, ready)
        # The boundary hands over compact tensors, and the virtual machine looks at their sizes;
        # nothing does where a kernel is called past it. What PyTorch returns inside a program may
        # be of another size than its meta function says.
        checked = bool(imported.torch_calls) or calling.kernel is not None

        def linked() -> bytes | None:
            with stages.timed("compile kernels"):
                return pipeline.library_code(
                    ready,
                    target=target,
                    checked=checked,
                    workers=workers,
                    checkpoint=checkpoint,
                )

        if store is not None and self.said is not None:
            said = {
                **self.said,
                "calling": calling.spelled(),
                "census": census,
                "kernels": kernels,
            }
            about = {
                **versions(),
                "made": time.time(),
                "library": way,
                "operators": imported.nodes,
                "kernels": census,
            }
            executable = _stored(store, key, said, about, linked, self.device)
            if executable is not None:
                return Built(imported, executable, calling, census, self, kernels)
        if objects.held(ready):  # objects of the user's are linked, and only a library is
            library_code = linked()
            assert library_code is not None
            executable = load(library_code, self.device.type)
            return Built(imported, executable, calling, census, self, kernels)
        with stages.timed("compile kernels"):
            executable = pipeline.machine_code(ready, target=target, checked=checked)
        return Built(imported, executable, calling, census, self, kernels)

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


Place = tuple[cache.Store | None, str]


def build(
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    options: Options,
    where: Place | None = None,
) -> Built:
    """Compile a graph, or find it compiled.

    Args:
        graph: a functional ATen graph; every node carries its fake value in ``meta["val"]``.
        specs: its inputs, see `importer.import_graph`.
        options: the backend's; `library` is one of `pipeline.lower`'s.
        where: what `place` gave for them, if it was asked.

    Raises:
        what `import_graph` and `Draft.compile` raise.
    """
    where = where or place(graph, specs, options)
    found = find(graph, specs, where)
    if found is not None:
        return found
    return draft_of(graph, specs, options, where[0] is not None).compile(options.library, *where)


def another(
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    options: Options,
    draft: Draft | None,
) -> Built | Callable[[Callable[[], None]], Built]:
    """What `build` does for a graph that was built with another `library` just before.

    Args:
        graph: see `build`.
        specs: the same.
        options: the same.
        draft: what the first program was compiled from, if it was compiled.

    Returns:
        the program where it was compiled before, else what compiles it, in any thread; it takes
        a function that is called now and then, and raises what that raises and `build` does.

    Raises:
        what `import_graph` raises, of a graph with symbolic sizes.
    """
    where = place(graph, specs, options)
    found = find(graph, specs, where)
    if found is not None:
        return found
    stored = where[0] is not None
    if draft is None and _is_symbolic(graph):  # what is decided by sizes becomes a guard now
        draft = draft_of(graph, specs, options, stored)

    def compiled(checkpoint: Callable[[], None]) -> Built:
        made = draft
        if made is None:
            checkpoint()
            with compile_lock:  # imports take turns
                made = draft_of(graph, specs, options, stored)
        return made.compile(options.library, *where, workers=1, checkpoint=checkpoint)

    return compiled


def _is_symbolic(graph: torch.fx.GraphModule) -> bool:
    """Whether any size of the graph is a symbol."""
    values = tree_leaves([n.meta.get("val") for n in graph.graph.nodes])
    return any(
        v._has_symbolic_sizes_strides
        if isinstance(v, torch.Tensor)
        else isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool))
        for v in values
    )


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
    sizes, device = _Sizes(graph), devices.of_graph(graph)
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


def place(
    graph: torch.fx.GraphModule, specs: Sequence[InputSpec], options: Options, tuned: str = ""
) -> Place:
    """Where a graph's program is kept, and by which key; `tuned` as for `graph_key`."""
    store = cache.open_store(options.cache, options.cache_size)
    if store is None:
        return None, ""
    try:
        return store, graph_key(graph, specs, options, native.use(), tuned)
    except NoSpelling as error:
        report.counters.skip_cache(str(error))
        return None, ""


def find(graph: torch.fx.GraphModule, specs: Sequence[InputSpec], where: Place) -> Built | None:
    """What `build` gives where the graph was compiled before."""
    store, key = where
    if store is None:
        return None
    with stages.recorded("look for the program on disk"):
        found = _restored(store, key, graph, specs)
    stages.note("cache", event="missed" if found is None else "found", key=key)
    if found is None:
        report.counters.count("cache_misses")
    else:
        report.counters.count("cache_hits")
        store.hit(key)
    return found


def _restored(
    store: cache.Store, key: str, graph: torch.fx.GraphModule, specs: Sequence[InputSpec]
) -> Built | None:
    entry = store.get(key)
    if entry is None:
        return None
    try:
        if not _Sizes(graph).hold(entry.said["guards"]):
            return None
        imported = restore(entry.said["imported"], graph, specs)
        calling = Calling.read(entry.said["calling"])
        share_threads()
        kernels = [(str(symbol), str(name)) for symbol, name in entry.said["kernels"]]
        census = dict(entry.said["census"])
        executable = _loaded(entry.library, devices.of_graph(graph))
        return Built(imported, executable, calling, census, kernels=kernels)
    except OSError as error:  # a full disk is no fault of the program's
        disk.warn_unusable(error)
        return None
    except Exception as error:  # whatever is wrong with it, the graph can be compiled
        store.drop(key, f"{type(error).__name__}: {error}")
        return None


def _stored(
    store: cache.Store,
    key: str,
    said: dict[str, Any],
    about: dict[str, Any],
    link: Callable[[], bytes | None],
    device: torch.device,
) -> Any:
    """Compile to a library, load it and keep it; None where it cannot be linked or loaded."""
    try:
        library = link()
    except pipeline.LinkError as error:
        log.warning("a program is not stored: %s", error)
        return None
    except OSError as error:
        disk.warn_unusable(error)
        return None
    if library is None:
        return None
    try:
        executable = _loaded(library, device)
    except _NotLoaded as error:
        disk.warn_unusable(error)
        return None
    store.put(key, cache.Entry(library, said, about))
    stages.note("cache", event="stored", key=key)
    return executable


class _NotLoaded(OSError):
    """No folder at hand lets libraries be loaded."""


def _loaded(library: bytes, device: torch.device) -> Any:
    try:
        return load(library, device.type)
    except Exception as error:
        raise _NotLoaded(f"they cannot be loaded: {error}") from error


class _Sizes:
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
