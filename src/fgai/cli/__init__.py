"""The command line: parse, call the library, print.

Commands are imported when they are called: `fgai --help` waits for nothing.
"""

from fgai.cli.app import App, app, main
from fgai.cli.output import FAILURE, Output, command

__all__ = ["FAILURE", "App", "Output", "app", "command", "main"]
