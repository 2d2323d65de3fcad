"""Converters from FX nodes to Relax, one module per operator family.

Each module registers its converters when it is imported; this package imports them all.
"""

import importlib
import pkgutil

for _module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
