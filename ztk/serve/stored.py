"""Conversations of responses, which `previous_response_id` continues."""

import json
import threading
from collections import OrderedDict
from typing import Any

from ztk.serve.values import BadRequest, shown

_CONVERSATIONS, _CHARACTERS = 1024, 1 << 26


class Stored:
    """The latest conversations, by the ids of their responses. The least recently used are dropped first."""

    def __init__(self, *, conversations: int = _CONVERSATIONS, characters: int = _CHARACTERS) -> None:
        """conversations, characters: limits of the store. Characters are counted in the messages' JSON."""
        self._most, self._characters = conversations, characters
        self._found: OrderedDict[str, str] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def keep(self, response: str, *, messages: tuple[dict[str, Any], ...]) -> None:
        """Stores the conversation that ends with `response`."""
        text = json.dumps(messages)
        with self._lock:
            self._found[response] = text
            self._size += len(text)
            while len(self._found) > self._most or self._size > self._characters:
                self._size -= len(self._found.popitem(last=False)[1])

    def conversation(self, response: object) -> tuple[dict[str, Any], ...]:
        """Returns the messages of a conversation. Raises BadRequest for a response that is not stored."""
        with self._lock:
            text = self._found.get(response) if isinstance(response, str) else None
            if text is not None:
                self._found.move_to_end(response)
        if text is None:
            raise BadRequest(
                f"Previous response with id '{shown(response)}' not found: the server stores the last {self._most} conversations, unless "
                "they have store=false; send the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return tuple(json.loads(text))
