"""Imports go down only: what each module may import, and what only one module may name."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the top down. A module imports from layers below its own; modules of one layer are
# siblings and do not import each other, but those of one group (one line here) may.
LAYERS = [
    [{"__init__", "cli", "commands", "testing", "demo"}],
    [{"doctor"}, {"checking"}, {"tuner"}],
    [{"explaining"}, {"lockstep", "differences"}, {"alone"}],
    [{"onnx_check", "onnx_sides"}],
    [
        {"backend", "trace_store"},
        {"frontend"},
        {"exporting"},
        {"coverage", "coverage_report", "core_calls"},
        {"custom", "custom_eager", "custom_kernels"},
    ],
    [
        {"rivals"},
        {"tally"},
        {"taking_turns"},
        {"extern"},
        {"ahead"},
        {"aot"},
        {"boxed"},
        {"on_gpu", "first_call"},
    ],
    [{"tuned_programs"}],
    [{"programs", "drafts", "compiling", "kernel_names"}, {"never_slower"}],
    [{"gpu_rewrites", "gpu_graphs", "gpu_epilogues", "gpu_norms", "gpu_layout", "gpu_indices"}],
    [{"alternatives"}, {"deploy"}, {"tuning"}],
    [
        {"importer"},
        {"graph_inputs", "views_again"},
        {"capture"},
        {"runtime"},
        {"pipeline"},
        {"names"},
        {"reproducers"},
        {"cache", "contents"},
    ],
    [
        {
            "accept",
            "as_they_lie",
            "calling",
            "control_flow",
            "folded",
            "graph_key",
            "imported",
            "ordered",
            "outputs",
            "printing",
            "overlapping",
            "torch_calls",
            "view_replay",
            "routes",
            "cuda_routes",
            "stored",
            "kept",
            "library_calls",
            "params",
            "writes",
            "partial_writes",
            "scalars",
            "storages",
            "told",
            "variables",
        },
        {"effects"},
    ],
    [{"converters"}],
    [
        {
            "agreement",
            "background",
            "clocks",
            "closeness",
            "collectives",
            "registry",
            "promotion",
            "bounds",
            "casting",
            "complexes",
            "dtypes",
            "shapes",
            "decompositions",
            "devices",
            "onednn",
            "elements",
            "eager_kernels",
            "eager_strides",
            "linear_algebra",
            "least_squares",
            "chunked_losses",
            "quantized",
            "int4",
            "covariance",
            "strided",
            "traced",
            "alignments",
            "marks",
            "rng_states",
            "layouts",
            "literals",
            "recurrent",
            "recurrent_cells",
            "recurrent_layers",
            "recurrent_library",
            "upsampling",
            "whole",
            "options",
            "tune_options",
            "size_terms",
            "spec",
            "switches",
            "logs",
            "provenance",
            "renaming",
            "stages",
            "compat",
            "objects",
            "object_symbols",
            "rules",
        },
        {"report"},
    ],
    [{"late"}],
    [{"tvm_import"}, {"required"}],
    [{"installed"}],
    [{"errors"}, {"_version"}, {"disk"}, {"units"}, {"collecting"}, {"tvm_runtime"}, {"locks"}],
    [{"another_python"}],
]
KEPT = {"kept_call", "kept_modules", "kept_probe", "module_view", "same_values", "graph_tidy"}
CAPTURE = {"capture_inputs", "capture_method", "capture_source"}
ALLOWED = {("pipeline", "runtime"): "the packed functions that library calls name"}


def _unit(module: str) -> str:
    """The unit of the layers that a dotted module name belongs to."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    return "kept" if name in KEPT else "capture" if name in CAPTURE else name


def _place(unit: str) -> tuple[int, int]:
    for level, groups in enumerate(LAYERS):
        for index, group in enumerate(groups):
            if unit in group:
                return level, index
    raise AssertionError(f"fx2relax.{unit} is in no layer; give it one in {Path(__file__).name}")


def _sources():
    for path in sorted((ROOT / "fx2relax").rglob("*.py")):
        relative = path.relative_to(ROOT).with_suffix("")
        parts = [p for p in relative.parts if p != "__init__"]
        yield ".".join(parts), path
    for path in sorted((ROOT / "converters").glob("*.py")):
        yield f"fx2relax.converters.{path.stem}", path


def _imports(module: str, path: Path):
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, node.module] if node.module else base)
            if name in ("fx2relax", "fx2relax.runtime", "fx2relax.pipeline"):
                yield from (f"{name}.{alias.name}" for alias in node.names)
            else:
                yield name


def violations(sources):
    """Each import that does not go down, as ``importer -> imported``."""
    found = []
    for module, path in sources:
        unit = _unit(module)
        level, group = _place(unit)
        for name in _imports(module, path):
            if not name.startswith("fx2relax"):
                continue
            other = _unit(name)
            if other == unit or (unit, other) in ALLOWED or (unit == "__init__"):
                continue
            other_level, other_group = _place(other)
            if other_level < level or (other_level == level and other_group != group):
                found.append(f"{module} -> {name}")
    return found


def test_imports_go_down():
    assert violations(_sources()) == []


def test_an_upward_import_is_found(tmp_path):
    bad = tmp_path / "registry.py"
    bad.write_text("from fx2relax.importer import import_graph\n")
    assert violations([("fx2relax.registry", bad)]) == ["fx2relax.registry -> fx2relax.importer"]


def test_a_sibling_import_is_found(tmp_path):
    bad = tmp_path / "build.py"
    bad.write_text("from fx2relax.importer import import_graph\n")
    assert violations([("fx2relax.pipeline.building", bad)]) == [
        "fx2relax.pipeline.building -> fx2relax.importer"
    ]


@pytest.mark.parametrize(("module", "path"), list(_sources()), ids=lambda v: str(v))
def test_tvm_is_named_in_few_places(module, path):
    """`compat` names TVM; so do the passes, the runtime and what runs without them."""
    naming = ("compat", "pipeline", "runtime", "deploy", "tvm_runtime")
    if module.split(".")[1:2] in [[name] for name in naming]:
        return
    named = [n for n in _imports(module, path) if n.split(".")[0] in ("tvm", "tvm_ffi")]
    assert named == [], f"{module} imports {named}; take the names from fx2relax.compat"


def test_no_second_name_for_the_converters():
    assert not (ROOT / "conftest.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
