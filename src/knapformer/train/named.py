"""Python objects of the user's that a command line names.

package.module:attribute       path/to/file.py:attribute
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from knapformer.errors import KnapFormerError, SpecError


def load_named(name: str, *, error: type[KnapFormerError] = SpecError) -> Any:
    """What a name stands for. Modules are also looked for in the current folder.

    Raises:
        error: naming what is not there. What the user's module itself raises is not caught.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        raise error(f"{name!r} names nothing in a module; give package.module:name or path/to/file.py:name")
    module = _from_file(module_name, error) if module_name.endswith(".py") else _imported(module_name, error)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise error(f"{module_name!r} has nothing called {attribute!r}") from None


def _imported(name: str, error: type[KnapFormerError]) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        raise error(f"cannot import {name!r}: {problem}") from problem


def _from_file(path: str, error: type[KnapFormerError]) -> ModuleType:
    if not Path(path).is_file():
        raise error(f"there is no file {path!r}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise error(f"{path!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
