"""Certificates: what no perturbation of a layer's attention within a radius can do to a node."""

from fgai.certificates.certification import certify
from fgai.certificates.injected import (
    INJECTION_PROMISE,
    WHERE,
    Injection,
    InjectionCertificate,
    LayerOrder,
)
from fgai.certificates.injection import certify_injection
from fgai.certificates.invariance import KEPT, invariant_layers
from fgai.certificates.layer import RADII, LayerCertificate
from fgai.certificates.prediction import Prediction
from fgai.certificates.record import ARITHMETIC, EXPLANATION, PROMISE, CertificateRecord
from fgai.certificates.tables import TABLE_RADII, Promising, promised
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
    "Promising",
    "VotingCertificate",
    "certify",
    "certify_injection",
    "invariant_layers",
    "promised",
    "vote",
]
