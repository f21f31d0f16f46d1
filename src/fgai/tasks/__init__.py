"""Node, link and graph tasks behind one interface: what is predicted, from which graph, at whose nodes."""

from fgai.tasks.base import PARTS, Task
from fgai.tasks.batch import GraphTask, take_graphs
from fgai.tasks.choose import TASKS, task_of
from fgai.tasks.link import LinkTask, negative_pairs
from fgai.tasks.node import NodeTask
from fgai.tasks.readout import POOLINGS, link_logits, pool

__all__ = [
    "PARTS",
    "POOLINGS",
    "TASKS",
    "GraphTask",
    "LinkTask",
    "NodeTask",
    "Task",
    "link_logits",
    "negative_pairs",
    "pool",
    "take_graphs",
    "task_of",
]
