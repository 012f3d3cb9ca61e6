"""Reading JSON that somebody else may have written."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """What ``json.loads`` gives. Raises ``json.JSONDecodeError``, also for text that is nested more
    deeply than Python can follow, for numbers of thousands of digits, and for bytes that are no
    text.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
