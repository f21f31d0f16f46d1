"""The command line: parse, call the library, print.

Commands are imported when they are called: `fgai --help` waits for nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch when it is first used."""
    if name == "options":
        return import_module("fgai.cli.options")
    if name in __all__:
        return getattr(import_module("fgai.cli.files"), name)
    raise AttributeError(f"module 'fgai.cli' has no attribute {name!r}")
