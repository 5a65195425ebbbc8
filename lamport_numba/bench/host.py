"""The ranks of a measurement on the host: the library's rendezvous, with values that JSON can carry."""

from __future__ import annotations

import json
from typing import Any

from ..symmetric import Communicator

__all__ = ["Host"]


class Host(Communicator):
    """A rendezvous in which ranks tell each other numbers and texts."""

    def share(self, value: Any, stage: str) -> list[Any]:
        """Every rank's ``value``, in rank order. Collective; ``stage`` is the name that errors carry."""
        return [json.loads(text) for text in self.all_gather(json.dumps(value).encode(), stage)]
