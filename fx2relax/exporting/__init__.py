"""Several functions of a model over one set of weights, to run without PyTorch."""

from fx2relax.exporting.artifact import Built
from fx2relax.exporting.callables import jit
from fx2relax.exporting.exported import Exported
from fx2relax.exporting.functions import export, from_exported_program

__all__ = ["Built", "Exported", "export", "from_exported_program", "jit"]
