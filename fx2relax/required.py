"""Imported before anything that needs PyTorch and TVM: raises where they are not there."""

from fx2relax import installed

installed.require()
