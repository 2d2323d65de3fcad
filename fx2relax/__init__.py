"""fx2relax: PyTorch models through Apache TVM's Relax."""

from fx2relax._version import __version__

__all__ = ["__version__"]
