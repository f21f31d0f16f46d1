"""The command line: parse, call the library, print.

Commands are imported when they are called: `fgai --help` waits for nothing.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from fgai.cli.app import App, app, main
from fgai.cli.output import FAILURE, Output, command

if TYPE_CHECKING:
    from fgai.cli import options
    from fgai.cli.files import checked_folder, checked_output

__all__ = [
    "FAILURE",
    "App",
    "Output",
    "app",
    "checked_folder",
    "checked_output",
    "command",
    "main",
    "options",
]


def __getattr__(name: str) -> _Any:
    """Load what reads models and data when it is first asked for."""
    if name in ("checked_folder", "checked_output"):
        return getattr(_import_module("fgai.cli.files"), name)
    if name == "options":
        return _import_module("fgai.cli.options")
    raise AttributeError(f"module 'fgai.cli' has no attribute {name!r}")
