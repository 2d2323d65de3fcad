"""Decoding one token against the time that reading the weights takes: no program can be faster.

Takes the folders of runs with ``--device cuda``, measures how fast the GPU copies, and prints a
line for each cell of a decoder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.results import Results

_BYTES = 1 << 30


def lines(results: Results, rate: float) -> list[str]:
    """One line a cell: what it took, the floor, and how many times the floor it took.

    Args:
        results: of one run.
        rate: how fast the GPU's memory is, in GB/s.
    """
    found = []
    dtype = results.environment.get("dtype", "float32")
    for group in results.groups:
        if not group.case.endswith("-decode") or group.mode != "inference":
            continue
        for side, cell in group.cells.items():
            name = f"{group.case} b{group.batch} {dtype:<8} {side:<24}"
            if cell.ms is None or cell.status != "ok":
                found.append(f"{name} {cell.status}: {cell.reason}")
                continue
            floor = cell.memory["weights"] * 2**20 / (rate * 1e9) * 1e3
            found.append(f"{name} {cell.ms:8.3f} ms, floor {floor:.3f} ms, x {cell.ms / floor:.2f}")
    return found


def bandwidth() -> float:
    """How fast the GPU reads and writes large tensors, in GB/s: the best of several copies."""
    import torch

    from benchmarks.gpu import milliseconds

    source = torch.zeros(_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = min(milliseconds(lambda: target.copy_(source), 10) for _ in range(5))
    return 2 * 10 * _BYTES / (best / 1e3) / 1e9


def main(folders: list[str]) -> None:
    """Print what the runs in some folders took."""
    rate = bandwidth()
    print(f"memory: {rate:.0f} GB/s")
    for folder in folders:
        for line in lines(Results.load(Path(folder) / "results.json"), rate):
            print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
