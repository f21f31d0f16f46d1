"""Faithful training against vanilla training: seconds and peak memory per epoch, side by side.

Both run as `fgai.train` and `fgai.make_faithful` run them, with their defaults; on the GPU
their steps are captured in CUDA graphs. Validation is not counted. Faithful epochs of different kinds (clean
graph, attacked graph) take turns, so times are means over pairs of epochs, and medians over those. On the CPU
each way runs in a process of its own. Run:

    python benchmarks/faithful.py --datasets amazon-photo coauthor-physics arxiv-tape --model GAT
"""

from __future__ import annotations

import argparse
import copy

from common import Measured, epoch_cost, show_ways, way_arguments

import fgai
from fgai.attention import add_limits, prepared
from fgai.training import FaithfulSettings, VanillaRecipe, untrained_model
from fgai.training.faithful import FaithfulRecipe

WAYS = ("vanilla", "fgai")
TRAINED = 20
"""Epochs of the vanilla model that the faithful one is made from: enough to have something to say."""


def measure(given: argparse.Namespace, way: str, dataset: str) -> Measured:
    model, device = given.model, given.device
    graph = fgai.load_dataset(dataset)
    if way == "vanilla":
        network = untrained_model(model, graph).to(device)
        graph = prepared(network, graph)
        recipe: object = VanillaRecipe(graph)
    else:
        graph = graph.to(device)
        vanilla = fgai.train(model, graph, epochs=TRAINED, progress=False).eval()
        graph = prepared(vanilla, graph)
        recipe = FaithfulRecipe(vanilla, graph, FaithfulSettings())
        network = copy.deepcopy(vanilla)
        if recipe.settings.limits:
            add_limits(network)
    return epoch_cost(network, recipe, given.epochs, device)


def main() -> None:
    given = way_arguments(__doc__, WAYS, ["amazon-photo", "coauthor-physics"]).parse_args()
    show_ways("Per epoch of faithful training", given, measure)


if __name__ == "__main__":
    main()
