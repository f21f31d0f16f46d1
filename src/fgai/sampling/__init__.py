"""Mini-batches: neighbours drawn around some nodes, by a sampler that PyG's loaders take."""

from fgai.sampling.batch import MiniBatch, mini_batch
from fgai.sampling.loader import Batches
from fgai.sampling.sample import Sample
from fgai.sampling.sampler import NeighbourSampler

__all__ = ["Batches", "MiniBatch", "NeighbourSampler", "Sample", "mini_batch"]
