"""Words that messages of operator, trainer and client share."""


def counted(count: int, noun: str) -> str:
    """A number with its noun, such as `1 worker` or `2 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counted_are(count: int, noun: str) -> str:
    """A number with its noun and verb, such as `1 worker is` or `2 workers are`."""
    return f"{counted(count, noun)} {'is' if count == 1 else 'are'}"
