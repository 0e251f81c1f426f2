"""The `tah2` command: thin modules that parse, call and print. See `tah2.cli.frame`."""

from tah2.cli.frame import main

__all__ = ["main"]
