"""Surroundings of a command: no notes and bars of transformers, and as many CPU threads as help."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from transformers import PreTrainedModel


SMALL = 20e6  # parameters: a model below this gains nothing from a second CPU thread


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' notes and bars; they and the number of threads are put back."""
    level, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    had_bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        torch.set_num_threads(threads)
        if had_bars:
            transformers.logging.enable_progress_bar()


def use_few_threads(target: PreTrainedModel) -> None:
    """One CPU thread for a small model on the CPU; inside of `quiet`, which puts the number back."""
    if target.device.type == "cpu" and target.num_parameters() < SMALL:
        torch.set_num_threads(1)
