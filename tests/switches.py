"""What a test sees compiled was compiled by it, and no verdict of a clock decides what is tested.

Tests of the cache, of timed calls and of what is compiled beside them turn these on.
"""

import os

os.environ.setdefault("FX2RELAX_CACHE", "0")
os.environ.setdefault("FX2RELAX_NEVER_SLOWER", "0")
os.environ.setdefault("FX2RELAX_BACKGROUND", "0")
os.environ.setdefault("FX2RELAX_COMPILE_PROCESS", "0")
