"""Exports that are saved, loaded where there is no PyTorch, and called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

# What a process without PyTorch does with a saved folder and a list of calls.
CALLS = """
import json, sys


class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("there is no torch here")


sys.meta_path.insert(0, NoTorch())
import numpy as np
import fx2relax

folder = sys.argv[1]
artifact = fx2relax.load(folder)
given = np.load(folder + "/given.npz")
for number, (name, names) in enumerate(json.load(open(folder + "/calls.json"))):
    results = artifact[name](**{n: given[f"{number}.{n}"] for n in names})
    results = results if isinstance(results, (list, tuple)) else [results]
    np.savez(f"{folder}/results{number}.npz", *results)
assert "torch" not in sys.modules
"""


def called_without_torch(folder: Path, calls: list[tuple[str, dict[str, torch.Tensor]]]):
    """The results of each call, each a list of tensors."""
    arrays = {f"{i}.{n}": t.numpy() for i, (_, given) in enumerate(calls) for n, t in given.items()}
    np.savez(folder / "given.npz", **arrays)
    (folder / "calls.json").write_text(json.dumps([(name, list(g)) for name, g in calls]))
    run = [sys.executable, "-c", CALLS, str(folder)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = []
    for number in range(len(calls)):
        with np.load(folder / f"results{number}.npz") as results:
            found.append([torch.from_numpy(results[n]) for n in results.files])
    return found
