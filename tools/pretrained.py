"""`python tools/pretrained.py` trains the models that come with fgai, and writes src/fgai/pretrained."""

from __future__ import annotations

from fgai import load_dataset, make_faithful, save_model, train
from fgai.graph.fingerprint import fingerprint
from fgai.training.model_file import PRETRAINED

DATASETS = ("planted", "cora")


def main() -> None:
    """Train a GAT on each graph, and make it faithful."""
    PRETRAINED.mkdir(exist_ok=True)
    for dataset in DATASETS:
        data = load_dataset(dataset)
        model = train("GAT", data)
        models = {
            "vanilla": (f"{dataset}-gat", model),
            "fgai": (f"{dataset}-fgai", make_faithful(model, data)),
        }
        for method, (name, one) in models.items():
            about = {"dataset": dataset, "split_seed": 0, "seed": 0, "method": method, "model": "GAT"}
            path = PRETRAINED / f"{name}.safetensors"
            print(save_model(one, path, data_fingerprint=fingerprint(data), about=about))


if __name__ == "__main__":
    main()
