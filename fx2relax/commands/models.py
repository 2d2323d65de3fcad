"""The model that a command is given."""

from __future__ import annotations

from typing import Any

import click


def read_model(model: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What a user's function returned, once eager has run a copy of it.

    Args:
        model: ``FILE.py:FUNCTION``.

    Returns:
        the module, its arguments, and those by name.

    Raises:
        click.BadParameter: there is none, or eager cannot run it.
    """
    from fx2relax.demo import sides

    try:
        module, args, kwargs = sides.read(model)
        sides.try_out(model, module, args, kwargs)
    except sides.NoModel as error:
        raise click.BadParameter(str(error), param_hint="MODEL.py:FUNCTION") from error
    return module, args, kwargs
