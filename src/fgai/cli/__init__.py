"""The command line: parse, call the library, print."""

from fgai.cli.app import app, main

__all__ = ["app", "main"]
