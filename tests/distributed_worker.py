"""What one of two processes does: every case in turn, beside the other process.

``torchrun --nproc-per-node=2 distributed_worker.py FOLDER DEVICE [CASE ...]`` writes
``FOLDER/RANK.json``, the outcome of each case: empty, or why it failed. A process ends with the
first case that fails: the other one, which may wait for it, then fails too.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import distributed_collectives
import distributed_other
import distributed_parallel
import torch
import torch.distributed as dist

import fx2relax

CASES = {
    **distributed_parallel.CASES,
    **distributed_collectives.CASES,
    **distributed_other.CASES,
}
IN_PYTORCH = {**distributed_collectives.IN_PYTORCH, **distributed_other.IN_PYTORCH}
#: Nothing of this takes as long on any machine; then it hangs.
SECONDS = 840


class _Heard(logging.Handler):
    """What fx2relax warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def outcome(name: str, device: str, heard: _Heard) -> str:
    """Run one case; why it failed, if it did."""
    torch._dynamo.reset()
    fx2relax.reset_stats()
    heard.said.clear()
    try:
        CASES[name](device)
        if device == "cpu":
            assert not heard.said, heard.said
            stats = fx2relax.stats()
            expected = IN_PYTORCH.get(name, set())
            assert set(stats["fallback_ops"]) == expected, stats["fallback_ops"]
            assert stats["graphs"] > 0, "nothing was compiled"
    except Exception:
        return traceback.format_exc()
    return ""


def main(folder: Path, device: str, names: list[str]) -> None:
    """Run the cases of this process."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", timeout=timedelta(seconds=SECONDS)
    )
    if device != "cpu":
        device = f"{device}:{rank}"
        torch.cuda.set_device(device)
    heard = _Heard()
    logging.getLogger("fx2relax").addHandler(heard)
    outcomes: dict[str, str] = {}
    for name in names:
        start = time.perf_counter()
        outcomes[name] = outcome(name, device, heard)
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        print(f"{rank}: {name}, {time.perf_counter() - start:.1f} s", flush=True)
        if outcomes[name]:
            print(outcomes[name], flush=True)
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:] or list(CASES))
