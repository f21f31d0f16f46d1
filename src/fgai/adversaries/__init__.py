"""The inner maximisations of faithful training: on the attention, by injected nodes, or both."""

from fgai.adversaries.attention import ascend_attention, probability_shift, worst_logit_shift
from fgai.adversaries.injection import InjectionAdversary

__all__ = ["InjectionAdversary", "ascend_attention", "probability_shift", "worst_logit_shift"]
