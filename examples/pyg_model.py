"""A plain PyG model made faithful in one call (run: python examples/pyg_model.py [dataset])."""

import sys

import torch
from torch.nn.functional import elu
from torch_geometric.nn import GATConv

import fgai
from fgai.evaluation import Comparison


class Net(torch.nn.Module):
    """Two GATConv layers, as in any PyG tutorial."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GATConv(features, 8, heads=8), GATConv(64, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.second(elu(self.first(x, edge_index)), edge_index)


def main(dataset: str = "cora", epochs: int = 100) -> Comparison:
    data = fgai.load_dataset(dataset).to_data()  # or any Data object of your own
    torch.manual_seed(0)
    model = fgai.train(Net(data.num_features, int(data.y.max()) + 1), data, epochs=epochs)
    faithful = fgai.make_faithful(model, data, epochs=epochs, lr=0.01)  # a Net: faithful(x, edge_index)
    return fgai.compare({"mine": model, "faithful": faithful}, data)


if __name__ == "__main__":
    main(*sys.argv[1:2]).show()
