"""Amounts of resources as Kubernetes writes them."""

import math
import re
from decimal import Decimal

_FORM = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?)([numkMGTPE]|[KMGTPE]i)?")
_FACTORS = {"": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}
_FACTORS |= {suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)}
_FACTORS |= {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)}


def whole(amount: int | str) -> int | None:
    """The amount, rounded up; None if it is not an amount.

    >>> [whole(amount) for amount in (2, "3", "4k", "16Gi", "1500m", "1e2", "two")]
    [2, 3, 4000, 17179869184, 2, 100, None]
    """
    return _rounded(amount, 1)


def thousandths(amount: int | str) -> int | None:
    """The amount in thousandths, rounded up; None if it is not an amount.

    >>> [thousandths(amount) for amount in (2, "100m", "1500u", "two")]
    [2000, 100, 2, None]
    """
    return _rounded(amount, 1000)


def _rounded(amount: int | str, factor: int) -> int | None:
    found = _FORM.fullmatch(str(amount))
    return math.ceil(factor * Decimal(found[1]) * _FACTORS[found[2] or ""]) if found else None
