"""What TVM's Python checks less in the process that compiles."""

import textwrap
from pathlib import Path

from fresh_process import run


def test_what_is_looked_at_less_is_the_same(tmp_path: Path) -> None:
    script = """
        import tvm, tvm_ffi
        from fx2relax.pipeline import quicker
        quicker.install()
        from tvm import s_tir
        items = tvm_ffi.convert([1, "two", None])
        print(list(items), list(tvm_ffi.convert([])), [a for a, _ in zip(items, "xy")], end=" ")
        x = tvm.te.placeholder((4,), "float32", name="x")
        y = tvm.te.compute((4,), lambda i: x[i] + 1.0, name="y")
        sch = s_tir.Schedule(tvm.te.create_prim_func([x, y]))
        inner = sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 2])[1]
        sch.vectorize(inner)
        print("T.vectorized(2)" in sch.mod.script(), end=" ")
        try:
            sch.split("not a loop", [None, 2])
        except Exception as error:
            print(type(error).__name__)
    """
    assert run(textwrap.dedent(script), tmp_path) == "[1, 'two', None] [] [1, 'two'] True TypeError"
