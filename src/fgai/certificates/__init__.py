"""Certificates: what no perturbation of a layer's attention within a radius can do to a node."""

from fgai.certificates.certification import certify
from fgai.certificates.familiar import KEPT, invariant_layers
from fgai.certificates.injection import (
    INJECTION_PROMISE,
    WHERE,
    Injection,
    InjectionCertificate,
    LayerOrder,
    certify_injection,
)
from fgai.certificates.layer import RADII, LayerCertificate, Prediction
from fgai.certificates.record import (
    ARITHMETIC,
    EXPLANATION,
    PROMISE,
    TABLE_RADII,
    CertificateRecord,
    promised,
)
from fgai.certificates.voting import VOTING_PROMISE, VotingCertificate, vote

__all__ = [
    "ARITHMETIC",
    "EXPLANATION",
    "INJECTION_PROMISE",
    "KEPT",
    "PROMISE",
    "RADII",
    "TABLE_RADII",
    "VOTING_PROMISE",
    "WHERE",
    "CertificateRecord",
    "Injection",
    "InjectionCertificate",
    "LayerCertificate",
    "LayerOrder",
    "Prediction",
    "VotingCertificate",
    "certify",
    "certify_injection",
    "invariant_layers",
    "promised",
    "vote",
]
