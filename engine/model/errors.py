"""The one kind of refusal that loading and running a model can give, and what others raise, in a line."""

from __future__ import annotations

import re


class ModelError(ValueError):
    """A model that cannot be found, read, supported or held. The message says what was asked, the limit, and the way out."""


def in_one_line(error: BaseException) -> str:
    """An error's kind and cause: 'OutOfResources: out of resource: shared memory, Required: 230000, …'.

    A compiler's message begins with the place and the source around it; its cause is the last line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and re.match(r"at \d+:\d+:", lines[0]):
        lines = lines[-1:]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
