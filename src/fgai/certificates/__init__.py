"""Certificates: what provably stays when attention moves or nodes are injected."""

from fgai.certificates.attention import certify_attention
from fgai.certificates.budget import BUDGET_PROMISE, BUDGETS, BudgetCertificate, certify_budget
from fgai.certificates.injection import (
    INJECTION_PROMISE,
    WHERE,
    InjectionCertificate,
    LayerOrder,
    certify_injection,
)
from fgai.certificates.integrity import POSITIONAL_CONDITION, invariant_layers
from fgai.certificates.record import (
    ALL_FOUR,
    ARITHMETIC,
    EXPLANATION,
    PROMISE,
    PROPERTIES,
    RADII,
    TABLE_RADII,
    CertificateRecord,
    LayerCertificate,
    Prediction,
    full_promise,
)
from fgai.certificates.voting import VOTING_PROMISE, VotingCertificate, vote

__all__ = [
    "ALL_FOUR",
    "ARITHMETIC",
    "BUDGETS",
    "BUDGET_PROMISE",
    "EXPLANATION",
    "INJECTION_PROMISE",
    "POSITIONAL_CONDITION",
    "PROMISE",
    "PROPERTIES",
    "RADII",
    "TABLE_RADII",
    "VOTING_PROMISE",
    "WHERE",
    "BudgetCertificate",
    "CertificateRecord",
    "InjectionCertificate",
    "LayerCertificate",
    "LayerOrder",
    "Prediction",
    "VotingCertificate",
    "certify_attention",
    "certify_budget",
    "certify_injection",
    "full_promise",
    "invariant_layers",
    "vote",
]
