"""Node, link and graph tasks behind one interface: what is predicted, from which graph, at whose nodes."""

from fgai.tasks.base import PARTS, Task
from fgai.tasks.batch import GraphTask, take_graphs
from fgai.tasks.link import LinkTask, negative_pairs
from fgai.tasks.node import NodeTask
from fgai.tasks.readout import POOLINGS, link_logits, pool
from fgai.tasks.registry import TASKS, check_logits, get_task, register_task, task_of, unregister_task

__all__ = [
    "PARTS",
    "POOLINGS",
    "TASKS",
    "GraphTask",
    "LinkTask",
    "NodeTask",
    "Task",
    "check_logits",
    "get_task",
    "link_logits",
    "negative_pairs",
    "pool",
    "register_task",
    "take_graphs",
    "task_of",
    "unregister_task",
]
