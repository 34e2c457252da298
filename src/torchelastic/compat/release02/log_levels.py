"""A module name of 0.2's: loggers whose level is that of `LOGLEVEL`."""

from __future__ import annotations

import logging
import sys

from torchelastic import env

__all__ = ["get_logger"]


def get_logger(name: str | None = None) -> logging.Logger:
    """The logger of this name, or of the module that calls; by default it shows warnings."""
    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))
    logger.setLevel(env.get("LOGLEVEL", "WARNING").upper())
    return logger
