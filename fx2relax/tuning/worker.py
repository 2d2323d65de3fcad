"""The process that tunes: ``python -m fx2relax.tuning.worker``.

It reads one line, what there is to do, and writes lines that say what it does. It ends with the
process that started it, whose end of the pipe closes then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, TextIO


def main() -> int:
    """Tune what the first line of the standard input says."""
    # What libraries print goes where errors go.
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    if job.get("nice"):
        os.nice(int(job["nice"]))
    _tune(job, told)
    return 0


def _end_with_the_other() -> None:
    sys.stdin.read()
    os._exit(1)


def _tune(job: dict[str, Any], told: TextIO) -> None:
    import torch

    torch.set_num_threads(int(job["threads"]))
    from fx2relax.errors import OptionError
    from fx2relax.pipeline import tuned
    from fx2relax.pipeline.target import as_target
    from fx2relax.tune_options import Fleet
    from fx2relax.tuning import measure
    from fx2relax.tuning.database import Database
    from fx2relax.tuning.kernels import Kernel
    from fx2relax.tuning.search import Search

    lock = threading.Lock()

    def tell(what: dict[str, Any]) -> None:
        with lock:
            told.write(json.dumps(what) + "\n")
            told.flush()

    target = as_target(job["target"])
    kernels = [
        Kernel(each["key"], each["name"], tuned.read(each["tir"]), each["calls"])
        for each in job["kernels"]
    ]
    fleet = Fleet(*job["fleet"]) if job["fleet"] else None
    try:
        place: Any = measure.Here() if fleet is None else measure.Remote(fleet, target, 60)
    except (OptionError, ImportError) as error:
        tell({"refused": str(error)})
        return
    search = Search(kernels, target, Database(target, job["database"]), place, tell)
    tell({"ready": True})
    search.run(float(job["seconds"]))
    tell({"done": True})


if __name__ == "__main__":
    sys.exit(main())
