# %% [markdown]
# # Audit your own GAT
#
# A PyTorch Geometric model with edge features, trained in a plain loop: may its attention be shown? Put your
# own model and `Data` in the first two cells; nothing else changes.

# %%
import tempfile
from pathlib import Path

import torch
from torch_geometric.nn import GATv2Conv

import fgai
from fgai.datasets import planted, random_split

graph = planted(num_nodes=500, num_classes=3)
split = random_split(graph, seed=0)
data = graph.replace(train_mask=split.train, val_mask=split.val, test_mask=split.test).to_data()
ends = data.x[data.edge_index]  # two numbers an edge: how alike its ends are, and how far apart
data.edge_attr = torch.stack([(ends[0] * ends[1]).sum(1), (ends[0] - ends[1]).norm(dim=1)], dim=1)
data


# %%
class Net(torch.nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.first = GATv2Conv(features, 8, heads=4, edge_dim=2)
        self.second = GATv2Conv(32, classes, edge_dim=2)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


torch.manual_seed(0)
model = Net(data.num_features, 3)
optimiser = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for _ in range(60):
    optimiser.zero_grad()
    logits = model(data.x, data.edge_index, data.edge_attr)[data.train_mask]
    torch.nn.functional.cross_entropy(logits, data.y[data.train_mask]).backward()
    optimiser.step()
model = model.eval()
right = model(data.x, data.edge_index, data.edge_attr).argmax(1) == data.y
accuracy = float(right[data.test_mask].double().mean())

# %% [markdown]
# ## 1. Does the attention say anything?

# %%
with fgai.record(model) as tape, torch.no_grad():
    model(data.x, data.edge_index, data.edge_attr)
tape.attention

# %%
sharpness = fgai.metrics.sharpness
{w.name: round(sharpness(w.heads("mean"), w.rowptr), 3) for w in tape.attention}

# %% [markdown]
# Sharpness is 0 where all neighbours get the same. Below 0.005 there is nothing to explain with.
#
# ## 2. Does it survive an attack?

# %%
size = {"nodes": 5, "edges": 5}  # a small attack for a small graph
comparison = fgai.compare({"mine": model}, data, curves=False, **size)
assert comparison["mine"].value("f1.clean") == accuracy  # the model fgai measures is the one you trained
comparison

# %% [markdown]
# ## 3. One node

# %%
fgai.explain(model, data, node=24, **size)

# %% [markdown]
# ## 4. What is proved?

# %%
print(*fgai.certify_attention(model, data, radius=0.01).sentences(), sep="\n")

# %% [markdown]
# ## Improve it
#
# Limits cost one pass; a faithful model is trained.

# %%
limited = fgai.limit(model, data)
faithful = fgai.make_faithful(model, data, epochs=30, lr=0.01, progress=False, **size)
models = {"mine": model, "limits": limited, "faithful": faithful}
after = fgai.compare(models, data, curves=False, nulls=False, **size)
rows = ["f1.clean", "f1.attacked", "overlap_touched.explanation.all", "sharpness.clean.all"]
rows.append("definition.r01.all_four.last")  # nodes where Definition 1 holds
after.to_pandas().loc[rows].astype(float).round(3)

# %% [markdown]
# Higher is better in every row.
#
# ## Show it

# %%
page = Path(tempfile.mkdtemp()) / "audit.html"
fgai.report({"mine": model, "faithful": faithful}, data, page, **size)
print(f"{page.name}: one file of {page.stat().st_size / 1e6:.1f} MB that opens from disk")

# %% [markdown]
# Before a claim: `threat="ensemble"`, more seeds, and the
# [threat model](../threat-model.md).
