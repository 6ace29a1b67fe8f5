"""How settings are read from a file: pydantic reads this from the class attribute `__pydantic_config__`."""

from __future__ import annotations

from typing import Any

UNKNOWN_KEYS_FAIL: dict[str, Any] = {"extra": "forbid"}
