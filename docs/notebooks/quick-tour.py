# %% [markdown]
# # A quick tour
#
# A GAT and its faithful version under the same threat. In this small graph half of the nodes inform about
# their class and the others mislead, so it is known which neighbours a good explanation names.

# %%
# %matplotlib inline
import fgai
from fgai.datasets import planted, random_split
from fgai.reports.figures import node_attention

graph = planted(num_nodes=500, num_classes=3)
split = random_split(graph, seed=0)
data = graph.replace(train_mask=split.train, val_mask=split.val, test_mask=split.test)
data

# %% [markdown]
# ## Train, and make it faithful
#
# Short trainings; leave `epochs` out for the default settings.

# %%
small = {"nodes": 5, "edges": 5}  # an attack that fits so small a graph
model = fgai.train("GAT", data, epochs=120, progress=False)
faithful = fgai.make_faithful(model, data, epochs=30, progress=False, **small)

# %% [markdown]
# ## Attack both alike
#
# Five injected nodes with five edges each; below the models attention that says nothing, and chance.

# %%
models = {"GAT": model, "FGAI": faithful}
comparison = fgai.compare(models, data, curves=False, **small)
comparison

# %% [markdown]
# ## One node

# %%
fgai.explain(faithful, data, node=24, vanilla=model, **small)

# %%
node_attention(faithful, data, node=24)

# %% [markdown]
# The dotted line is equal attention; ticks are neighbours that inform.
#
# ## At how many nodes does Definition 1 hold?

# %%
record = fgai.certify_attention(faithful, data, vanilla=model, radius=0.01)
print(*record.sentences(), sep="\n")

# %%
record

# %% [markdown]
# [How to read it](../read-a-certificate.md). As a data frame:

# %%
frame = record.to_pandas()
frame[["layer", "node", "degree", "topk_radius", "class_radius"]].head()

# %% [markdown]
# Next: [your own model](../own-model.md).
