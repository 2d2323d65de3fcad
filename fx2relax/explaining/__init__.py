"""What became of a model: `explain`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fx2relax import never_slower, stages
from fx2relax.explaining.build import data
from fx2relax.explaining.calls import compiled_call, name_of
from fx2relax.explaining.recorder import Recorder
from fx2relax.explaining.report import Data

__all__ = ["Explanation", "explain"]

# Programs that take turns are called so often at most until it is known which one stays.
_CALLS = 5 * never_slower.SETTLED


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    grad: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> Explanation:
    """Compile a model, and say what became of each of its operators.

    The model is compiled anew, without the cache on disk, and called until it is known which of its
    programs is the fastest.

    Args:
        model: a module or a function, not compiled.
        inputs: what it is called with.
        grad: whether gradients are wanted too: the sum of all floating-point results is
            differentiated, and the backward graph is part of the report. Gradients of weights and
            inputs are left as they were.
        kwargs: named arguments of the call.
        dynamic: see `torch.compile`.
        options: the backend's, see the README; `cache` is off.

    Returns:
        the report; print it, show it in a notebook, or ask it to `measure`.

    Raises:
        ValueError: `grad`, and nothing that is known requires a gradient.
        Exception: what calling the model raises.
    """
    call = compiled_call(model, inputs, grad=grad, kwargs=kwargs, dynamic=dynamic, options=options)
    recorder = Recorder()
    with stages.observed(recorder):
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        for turn in range(_CALLS):
            if turn > never_slower.SETTLED and recorder.settled:
                break
            call()
    return Explanation(data(recorder, name_of(model), seconds), recorder, call)


class Explanation:
    """What became of a model.

    Made by `explain`.

    Attributes:
        data: all that is known, as plain data.
    """

    def __init__(self, data: Data, recorder: Recorder, call: Callable[[], Any]) -> None:
        self.data = data
        self._recorder = recorder
        self._call = call

    def measure(self, seconds: float = 2.0) -> Explanation:
        """Call the model and time its kernels.

        Args:
            seconds: how long the calls may take together, about.

        Returns:
            this report, with times in it.
        """
        from fx2relax.explaining.measure import measure

        measure(self.data, self._recorder, self._call, seconds)
        return self

    def to_json(self) -> str:
        """All of it as JSON; see `fx2relax.explaining.report.Data` for the fields."""
        return self.data.to_json()

    def to_html(self) -> str:
        """A page of its own, in HTML, which needs nothing else."""
        from fx2relax.explaining.html import page

        return page(self.data)

    def save(self, path: str) -> None:
        """Write `to_html`, or `to_json`.

        Args:
            path: of the file; JSON where it ends in ``.json``, else HTML.

        Raises:
            OSError: it cannot be written.
        """
        text = self.to_json() if str(path).endswith(".json") else self.to_html()
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def plot(self, kind: str = "layers") -> Any:
        """A picture by matplotlib.

        Args:
            kind: "layers" (time of each layer), "timeline" (kernels in order), "roofline"
                (operations a second over operations a byte) or "levels" (FX, Relax and TIR beside
                each other). The first three need `measure`.

        Returns:
            a `matplotlib.figure.Figure`.

        Raises:
            ValueError: there is no such kind, or it needs times.
        """
        from fx2relax.explaining.plots import draw

        return draw(self.data, kind)

    def show(self, console: Any) -> None:
        """Print it to a `rich.console.Console`."""
        from fx2relax.explaining.text import show

        show(self.data, console)

    def __str__(self) -> str:
        from fx2relax.explaining.text import text

        return text(self.data)

    def _repr_html_(self) -> str:
        from fx2relax.explaining.html import fragment

        return fragment(self.data)
