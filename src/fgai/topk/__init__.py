"""Top-k sets of attention: the largest edges, the overlap of two sets, the cost of swapping edges.

Attention is given as `values` [E], one number per edge (heads averaged), and `rowptr` [N+1]: the edges into
node i are `rowptr[i]:rowptr[i+1]`. Scope "node" takes k edges from every neighbourhood, "graph" takes k of
all edges; `k=None` and any k above the degree stand for all edges. Ties are broken by edge order.
"""

from fgai.topk.sets import SCOPES, check_k, leaders, overlap, ranks_in_rows, scoped_rows, topk_l1, topk_mask
from fgai.topk.swaps import NORMS, swap_costs, swap_margin

__all__ = [
    "NORMS",
    "SCOPES",
    "check_k",
    "leaders",
    "overlap",
    "ranks_in_rows",
    "scoped_rows",
    "swap_costs",
    "swap_margin",
    "topk_l1",
    "topk_mask",
]
