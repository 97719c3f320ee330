"""Functions named in the configuration as ``module:function``: data sources, rewards."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from everstep.errors import BadInput


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """The function that ``key`` of the configuration names as ``module:function``.

    Modules are found as Python finds them, and in the current directory. BadInput, naming ``key``, if the module cannot
    be imported, raises while it is, or has no such callable.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name.isidentifier():
        raise BadInput(f"{key}={spec} must have the form module:function")
    # The console script does not put the current directory on the path, unlike `python -m`.
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{key}={spec}: there is no module {error.name!r}; install it or start from the folder that holds it ({here})"
        ) from error
    except Exception as error:  # a fault boundary: user code may raise anything while it is imported
        raise BadInput(f"{key}={spec}: importing {module_name} fails: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [n for n in vars(module) if callable(getattr(module, n))], n=1)
        hint = f"; did you mean {module_name}:{close[0]}?" if close else ""
        what = "has nothing called" if function is None else "has no function (but another object) called"
        raise BadInput(f"{key}={spec}: {module_name} {what} {name!r}{hint}")
    return function


def check_arguments(
    function: Callable[..., Any], count: int, kwargs: dict[str, Any], spec: str, key: str, args_key: str = "keyword arguments"
) -> None:
    """BadInput if ``function`` cannot be called with ``count`` positional arguments and ``kwargs``, which ``args_key`` holds."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call itself will tell
    try:
        signature.bind(*([None] * count), **kwargs)
    except TypeError as error:
        with_what = [f"{count} positional argument{'' if count == 1 else 's'}"] if count or not kwargs else []
        with_what += [f"{args_key}={kwargs}"] if kwargs else []
        raise BadInput(f"{key}={spec} cannot be called with {' and '.join(with_what)}: {error} (its signature is {signature})") from error
