"""The command line: parse, call the library, print. Beside the application, what commands are made of."""

from fgai.cli import options
from fgai.cli.files import checked_folder, checked_output
from fgai.cli.output import FAILURE, Output, command
from fgai.cli.tree import App

# isort: split
# The experiments, which the application finds, make their commands of the names above.
from fgai.cli.app import app, main

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
