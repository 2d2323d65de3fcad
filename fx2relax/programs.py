"""From an ATen graph to something that runs: compiled, or compiled before and kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx
from torch._dynamo.convert_frame import compile_lock
from torch.utils._pytree import tree_leaves

from fx2relax import background, cache, devices, disk, report, stages
from fx2relax.calling import Calling
from fx2relax.compiling import client
from fx2relax.drafts import Built, Draft, Sizes, draft_of, loaded
from fx2relax.graph_key import graph_key, is_symbolic
from fx2relax.literals import NoSpelling
from fx2relax.options import Options
from fx2relax.params import InputSpec
from fx2relax.pipeline.threads import share_threads
from fx2relax.runtime import native
from fx2relax.stored import restore

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
    begun = begin(graph, specs, options, where)
    return begun() if callable(begun) else begun


def begin(
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    options: Options,
    where: Place | None = None,
) -> Built | Callable[[], Built]:
    """`build`, without waiting for another process.

    Args:
        graph: see `build`.
        specs: the same.
        options: the same.
        where: the same.

    Returns:
        the program, or, while it is compiled elsewhere, what waits for it: once, in any thread. It
        raises what `build` does.

    Raises:
        what `build` raises.
    """
    where = where or place(graph, specs, options)
    found = find(graph, specs, where)
    if found is not None:
        return found

    def here() -> Built:
        stored = where[0] is not None
        return draft_of(graph, specs, options, stored).compile(options.library, *where)

    asked = client.asked(graph, specs, options, where[1])
    if asked is None:
        return here()

    def awaited() -> Built:
        made = _of_answer(asked.answer(), graph, specs, where)
        if made is not None:
            return made
        with compile_lock:  # imports take turns
            return here()

    return awaited


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
    symbolic = is_symbolic_graph(graph)
    if draft is None and symbolic:  # what is decided by sizes becomes a guard now
        draft = draft_of(graph, specs, options, stored)

    def compiled(checkpoint: Callable[[], None]) -> Built:
        made = draft
        waited_for = not background.enabled()
        # A thread of this process would keep others' calls from Python, and from its processors.
        if not symbolic and (made is None or not waited_for):
            asked = client.asked(graph, specs, options, where[1], waited_for=waited_for)
            if asked is not None:
                with background.elsewhere():
                    entry = asked.answer(checkpoint)
                found = _of_answer(entry, graph, specs, where)
                if found is not None:
                    return found
            checkpoint()
        if made is None:
            with compile_lock:  # imports take turns
                made = draft_of(graph, specs, options, stored)
        return made.compile(options.library, *where, workers=1, checkpoint=checkpoint)

    return compiled


def expect_any() -> None:
    """Get ready for graphs that are about to be captured, in a program that has none on disk."""
    client.begin_early(cache.open_store())


def expect(graph: torch.fx.GraphModule, inputs: Sequence[object], options: Options) -> None:
    """Get ready for a graph of Dynamo's that is about to be traced, and that is not known yet."""
    client.begin_for(graph, inputs, cache.open_store(options.cache, options.cache_size))


def is_symbolic_graph(graph: torch.fx.GraphModule) -> bool:
    """Whether any size of the graph is a symbol."""
    return any(map(is_symbolic, tree_leaves([n.meta.get("val") for n in graph.graph.nodes])))


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
        built = _of_entry(entry, graph, specs)
        if built is not None:
            built.found = True
        return built
    except OSError as error:  # a full disk is no fault of the program's
        disk.warn_unusable(error)
        return None
    except Exception as error:  # whatever is wrong with it, the graph can be compiled
        store.drop(key, f"{type(error).__name__}: {error}")
        return None


def _of_entry(
    entry: cache.Entry, graph: torch.fx.GraphModule, specs: Sequence[InputSpec]
) -> Built | None:
    """The program of an entry; None where its guards do not hold."""
    if not Sizes(graph).hold(entry.said["guards"]):
        return None
    imported = restore(entry.said["imported"], graph, specs)
    calling = Calling.read(entry.said["calling"])
    share_threads()
    kernels = [(str(symbol), str(name)) for symbol, name in entry.said["kernels"]]
    census = dict(entry.said["census"])
    executable = loaded(entry.library, devices.of_graph(graph))
    return Built(imported, executable, calling, census, kernels=kernels)


def _of_answer(
    entry: cache.Entry | None,
    graph: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    where: Place,
) -> Built | None:
    """The program as another process compiled it, which is kept; None where it did not."""
    if entry is None:
        return None
    store, key = where
    try:
        built = _of_entry(entry, graph, specs)
    except OSError as error:
        disk.warn_unusable(error)
        return None
    if built is not None and store is not None:
        store.put(key, entry)
        stages.note("cache", event="stored", key=key)
    return built
