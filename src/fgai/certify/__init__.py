"""Certificates: what no perturbation of a layer's attention within a radius can do to a node."""

from fgai.certify.certification import certify
from fgai.certify.layer import RADII, LayerCertificate
from fgai.certify.prediction import Prediction
from fgai.certify.record import PROMISE, CertificateRecord
from fgai.certify.tables import TABLE_RADII

__all__ = [
    "PROMISE",
    "RADII",
    "TABLE_RADII",
    "CertificateRecord",
    "LayerCertificate",
    "Prediction",
    "certify",
]
