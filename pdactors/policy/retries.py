"""How often, and how soon, what was lost is begun again. Pure."""

from __future__ import annotations

MAX_ATTEMPTS = 4
FIRST_BACKOFF_S = 0.5  # before the third attempt; before the second there is no wait
ASK_AGAIN_S = 1.0  # when the gateway does not say what its client has


def backoff_s(attempt: int) -> float:
    """Return how long to wait before that attempt begins: what fails again and again may be what breaks engines."""
    return 0.0 if attempt <= 2 else FIRST_BACKOFF_S * 2.0 ** (attempt - 3)
