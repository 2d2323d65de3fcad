"""Several functions of a model over one set of weights, to run without PyTorch."""

from fx2relax.exporting.functions import Exported, export, from_exported_program

__all__ = ["Exported", "export", "from_exported_program"]
