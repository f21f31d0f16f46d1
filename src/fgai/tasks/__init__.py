"""Node, link and graph tasks behind one interface: what is predicted, from which graph, at whose nodes."""

from fgai.tasks.base import (
    PARTS,
    TASKS,
    NodeTask,
    Task,
    check_logits,
    get_task,
    register_task,
    task_of,
)
from fgai.tasks.batch import POOLINGS, GraphTask, pool
from fgai.tasks.link import DECODERS, LinkTask, link_logits, negative_pairs

__all__ = [
    "DECODERS", "PARTS", "POOLINGS", "TASKS", "GraphTask", "LinkTask", "NodeTask", "Task", "check_logits",
    "get_task", "link_logits", "negative_pairs", "pool", "register_task", "task_of",
]  # fmt: skip

for _task in (NodeTask(), LinkTask(), GraphTask()):
    register_task(_task)
