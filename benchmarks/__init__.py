"""Times networks and kernels under several compilers; `python -m benchmarks --help` says how."""
