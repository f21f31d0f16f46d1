"""The tasks by name, and from a graph to its task: the data says what is to be predicted."""

from __future__ import annotations

from torch import Tensor

from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.tasks.base import Task
from fgai.tasks.batch import GraphTask
from fgai.tasks.link import LinkTask
from fgai.tasks.node import NodeTask
from fgai.typed import typed

TASKS: dict[str, Task] = {}
"""Every task the library knows, by name."""


@typed
def register_task(task: Task) -> Task:
    """Add a task: models, datasets, training, evaluation and the command line then know its name.

    Of several tasks that fit a graph, the one registered last is taken.

    Args:
        task: of your own, with at least one score.

    Returns:
        The same task.

    Raises:
        InputError: the name is taken, or there is nothing to score it by.
    """
    if task.name in TASKS:
        raise InputError(f"there is a task {task.name!r} already; choose another name")
    if not task.scores:
        raise InputError(f"the task {task.name!r} needs `scores`: at least one name and its function")
    TASKS[task.name] = task
    return task


@typed
def unregister_task(name: str) -> None:
    """Take a task out again.

    Raises:
        InputError: there is none of that name.
    """
    del TASKS[get_task(name).name]


@typed
def get_task(name: str) -> Task:
    """Return a task by its name.

    Raises:
        InputError: there is none of that name; says which there are.
    """
    return TASKS[one_of(name, "task", tuple(TASKS))]


@typed
def task_of(graph: Graph) -> Task:
    """Return the task a graph is for: links if it carries some, graphs if it is a batch, nodes otherwise.

    Raises:
        InputError: no registered task fits.

    Example:
        >>> import torch
        >>> pair = Graph.from_edges(torch.tensor([[0, 1], [1, 0]]), 2)
        >>> task_of(pair).name, task_of(pair.replace(batch=torch.tensor([0, 1]))).name
        ('node', 'graph')
    """
    for task in reversed(TASKS.values()):
        if task.fits(graph):
            return task
    raise InputError(f"{graph.name!r} fits none of the tasks {', '.join(TASKS)}")


@typed
def check_logits(logits: Tensor, graph: Graph) -> None:
    """Raise if a model's outputs do not fit what is to be predicted on a graph.

    Args:
        logits: a row for everything there is to classify, a column per class.
        graph: with or without labels.

    Raises:
        InputError: rows are missing, or a class has no column.
    """
    task = task_of(graph)
    rows, classes = task.count(graph), graph.num_classes
    if logits.dim() == 2 and logits.shape[0] == rows and logits.shape[1] >= classes:
        return
    labels = task.labels(graph)
    known = None if labels is None else labels[labels >= 0]
    lowest = 0 if known is None or not known.numel() else int(known.min())
    hint = f"; labels begin at {lowest}, classes are counted from 0: use `y - {lowest}`" if lowest else ""
    raise InputError(
        f"the model must return logits [{rows}, {max(2, classes)}] on {graph.name!r},"
        f" got {tuple(logits.shape)}{hint}"
    )


for _task in (NodeTask(), LinkTask(), GraphTask()):
    register_task(_task)
