"""From a graph to its task: the data says what is to be predicted."""

from __future__ import annotations

from fgai.graph import Graph
from fgai.tasks.base import Task
from fgai.tasks.batch import GraphTask
from fgai.tasks.link import LinkTask
from fgai.tasks.node import NodeTask

TASKS: dict[str, Task] = {task.name: task for task in (NodeTask(), LinkTask(), GraphTask())}


def task_of(graph: Graph) -> Task:
    """Return the task a graph is for: links if it carries some, graphs if it is a batch, nodes otherwise.

    Example:
        >>> import torch
        >>> pair = Graph.from_edges(torch.tensor([[0, 1], [1, 0]]), 2)
        >>> task_of(pair).name, task_of(pair.replace(batch=torch.tensor([0, 1]))).name
        ('node', 'graph')
    """
    if graph.links is not None:
        return TASKS["link"]
    return TASKS["graph" if graph.batch is not None else "node"]
