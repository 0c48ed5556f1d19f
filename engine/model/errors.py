"""The one kind of refusal that loading and running a model can give."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be found, read, supported or held. The message says what was asked, the limit, and the way out."""
