"""The errors that a user can mend: the commands print their message alone. Anything else is a bug, with a traceback."""

import difflib
import math


class UserError(Exception):
    """Something the user gave, or the machine has, does not work: the message says what was given and the mend."""


class ConfigError(UserError, ValueError):
    """A configuration that cannot work, found before anything is compiled or written."""


class DivergenceError(UserError, ArithmeticError):
    """No member of the population has a finite loss any more."""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError` with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_at_least(minimum: float, **fields: float) -> None:
    """Raise `ConfigError` for the first field that is not a number of at least `minimum`.

    Written as ``not value >= minimum`` so that NaN is refused too.
    """
    for name, value in fields.items():
        require(value >= minimum, f"{name} must be at least {minimum}, got {value}.")


def require_positive(**fields: float) -> None:
    """Raise `ConfigError` for the first field that is not a finite number above zero."""
    for name, value in fields.items():
        require(0 < value < float("inf"), f"{name} must be a finite number above 0, got {value}.")


def require_unit_interval(**fields: float) -> None:
    """Raise `ConfigError` for the first field outside [0, 1]."""
    for name, value in fields.items():
        require(0 <= value <= 1, f"{name} must lie in [0, 1], got {value}.")


def nearest(given: str, known: "list[str] | tuple[str, ...]") -> str:
    """'Did you mean X? ' when one of `known` resembles `given`, else an empty string."""
    by_lower_case = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), by_lower_case, n=1, cutoff=0.5)
    return f"Did you mean {by_lower_case[close[0]]}? " if close else ""


def divisors_near(number: int, target: int) -> str:
    """The three divisors of `number` that are nearest to `target`, as a list in words."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = {*small, *(number // divisor for divisor in small)}
    return ", ".join(map(str, sorted(sorted(divisors, key=lambda divisor: abs(divisor - target))[:3])))
