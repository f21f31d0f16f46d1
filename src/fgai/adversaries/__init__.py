"""The inner maximisations of faithful training: on the attention, by injected nodes, or both."""

from fgai.adversaries.attention import ascend_attention, probability_shift, worst_logit_shift
from fgai.adversaries.injection import InjectionAdversary, reach_shares

__all__ = ["InjectionAdversary", "ascend_attention", "probability_shift", "reach_shares", "worst_logit_shift"]
