"""What if: a page on which edges go and come and nodes are injected, with attention and class beside them."""

from fgai.reports.whatif.answer import NodeAnswer, WhatIf
from fgai.reports.whatif.scripts import module, style
from fgai.reports.whatif.server import Server
from fgai.reports.whatif.widget import explore

__all__ = ["NodeAnswer", "Server", "WhatIf", "explore", "module", "style"]
