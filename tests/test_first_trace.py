"""The first graph of a process is traced like those after it."""

import json

from fresh_process import run

# Converters are imported when a graph is converted: what is to stay whole is known before.
_KEPT = """
import json
import fx2relax.backend
from fx2relax import registry, whole

before = set(map(str, whole._kept))
registry.load()
print(json.dumps(sorted(set(map(str, whole._kept)) - before)))
"""


def test_what_stays_whole_is_known_before_the_first_trace(tmp_path):
    assert json.loads(run(_KEPT, tmp_path)) == []


def test_the_first_upsampling_stays_whole(tmp_path):
    script = """
        import json
        import torch
        import fx2relax

        def f(x):
            return torch.nn.functional.interpolate(x, size=(11, 13), mode="bilinear")

        torch.manual_seed(0)
        x = torch.randint(0, 256, (1, 3, 7, 5), dtype=torch.uint8)
        report = json.loads(fx2relax.explain(f, x).to_json())
        names = [node["name"] for node in report["graphs"][0]["nodes"]]
        print(json.dumps([names, torch.equal(torch.compile(f, backend="relax")(x), f(x))]))
    """
    assert json.loads(run(script, tmp_path)) == [["resample"], True]
