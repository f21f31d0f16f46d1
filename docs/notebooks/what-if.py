# %% [markdown]
# # What if, in a notebook
#
# Inject a node into a GAT and its faithful version, and watch the attention.

# %%
import fgai
from fgai.graph import ChangeRecord
from fgai.reports import WhatIf

data = fgai.load_dataset("planted")
models = {name: fgai.from_pretrained(f"planted-{name.lower()}") for name in ("GAT", "FGAI")}
fgai.explore(models, data, node=24)

# %% [markdown]
# ![The page, with an injected node](../images/what-if.png)
#
# ## The same in code
#
# The worst node that an attack on the GAT finds, joined to node 24:

# %%
answers = WhatIf(models, data)
worst = answers.worst(ChangeRecord.of(models["GAT"], data, 24).to_dict())
new = {"features": worst, "strength": 1.0, "edges": [24]}
for name, model in models.items():
    change = ChangeRecord.of(model, data, 24, injected=[new])
    before, after = (answer.summary() for answer in answers.view(name, change))
    print(f"{name}: class {before['class']} -> {after['class']}, probability {after['probability']:.2f}")
    print("  attention now:", [(node, round(share, 2)) for node, share in after["attention"][:3]])

# %% [markdown]
# `change.save("change-24.json")` writes what `fgai evaluate planted-fgai --change change-24.json` replays.
