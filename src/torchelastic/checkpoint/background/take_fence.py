"""The claim of a world to write checkpoints: takes the fence in the background."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from torchelastic.checkpoint.catalog import Catalog
from torchelastic.checkpoint.fence import Fence
from torchelastic.checkpoint.marker import History

log = logging.getLogger(__name__)


class FenceClaim:
    """Takes the fence once: in a thread when the world begins, or with its first checkpoint."""

    def __init__(self, catalog: Catalog, fence: Fence, base: int | None = None) -> None:
        self.fence = fence
        self._catalog, self._base = catalog, base
        self._taken = False
        self._began, self._before = time.monotonic(), History()
        self._thread: threading.Thread | None = None

    def history(self) -> History:
        """Return the history of this start of the job until now."""
        here = time.monotonic() - self._began
        return replace(self._before, seconds=self._before.seconds + here)

    def begin(self) -> None:
        thread = threading.Thread(target=self._try, name="torchelastic-fence", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left
            self._warn(error)
        else:
            self._thread = thread

    def ensure(self) -> None:
        """Return when this world has the fence. May block: not for the training thread."""
        if self._thread is not None:
            self._thread.join()
        if not self._taken:
            self._take()

    def _take(self) -> None:
        self._catalog.take(self.fence, self._base)
        self._before = self._catalog.history(self.fence)
        self._taken = True

    def _try(self) -> None:
        try:
            self._take()
        except Exception as error:  # of any storage
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        log.warning(
            "Cannot write checkpoints to %s yet: %s. The first checkpoint tries again.",
            self._catalog.storage.place,
            error,
        )
