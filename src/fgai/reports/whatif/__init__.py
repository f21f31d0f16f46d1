"""What if: a page that shows how a node's attention and class change with its edges and injected nodes."""

from fgai.reports.whatif.answer import NodeAnswer, WhatIf
from fgai.reports.whatif.server import Server, explore

__all__ = ["NodeAnswer", "Server", "WhatIf", "explore"]
