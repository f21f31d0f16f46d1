"""Certificates: what no perturbation of a layer's attention within a radius can do to a node."""

from fgai.certificates.certification import certify
from fgai.certificates.injection import InjectionCertificate, certify_injection
from fgai.certificates.layer import RADII, LayerCertificate
from fgai.certificates.prediction import Prediction
from fgai.certificates.record import PROMISE, CertificateRecord
from fgai.certificates.tables import TABLE_RADII

__all__ = [
    "PROMISE",
    "RADII",
    "TABLE_RADII",
    "CertificateRecord",
    "InjectionCertificate",
    "LayerCertificate",
    "Prediction",
    "certify",
    "certify_injection",
]
