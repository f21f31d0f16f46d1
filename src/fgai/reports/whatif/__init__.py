"""What if: a page that shows how a node's attention and class change with its edges and injected nodes."""

from fgai.reports.whatif.answer import WhatIf
from fgai.reports.whatif.server import Server, explore

__all__ = ["Server", "WhatIf", "explore"]
