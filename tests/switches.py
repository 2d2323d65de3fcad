"""What a test sees compiled was compiled by it, and no verdict of a clock decides what is tested.

Tests of the cache and of timed calls turn them on.
"""

import os

os.environ.setdefault("FX2RELAX_CACHE", "0")
os.environ.setdefault("FX2RELAX_NEVER_SLOWER", "0")
