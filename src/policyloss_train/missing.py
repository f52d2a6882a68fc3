"""What the options name and what is not there: found before a run directory is made."""

from __future__ import annotations

from policyloss.errors import InputError
from policyloss_train.chat import read_template
from policyloss_train.config import TrainConfig
from policyloss_train.models import refuse_missing_folder
from policyloss_train.optimizers import torchao
from policyloss_train.tasks import GYM, make_task
from policyloss_train.tiny import TINY
from policyloss_train.user_code import is_reference, load_code


def refuse_missing(config: TrainConfig) -> None:
    """Raise for a file, a folder, code or a package that cannot be found, or a task that cannot be
    read. The loss was read with the options.
    """
    for value, what in (
        (config.advantage, "the advantage"),
        (config.rollout, "the rollout engine"),
    ):
        if value is not None and is_reference(value):
            load_code(value, what)
    if not config.task.startswith(GYM):  # whose data sets take a while, and are no files
        make_task(config.task, reward=config.reward, seed=config.seed)
    if config.model not in TINY:
        refuse_missing_folder(config.model)
    if config.teacher is not None and not config.teacher.is_dir():
        named = f"there is no folder {config.teacher}"
        raise InputError(f"{named}; --teacher is that of a model, or a run directory.")
    if config.chat_template is not None:
        read_template(config.chat_template)
    if config.optimizer == "adamw8bit":
        torchao()
