"""A module of 0.2: loggers with the level in `LOGLEVEL`."""

from __future__ import annotations

import logging
import sys

from torchelastic import env

__all__ = ["get_logger"]


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the logger of this name, or of the calling module; the default level is WARNING."""
    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))
    logger.setLevel(env.get("LOGLEVEL", "WARNING").upper())
    return logger
