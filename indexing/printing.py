"""Text to print: error messages, log lines and tables use it."""


def printable(text: str) -> str:
    """`text` on one line, with control characters escaped like `\\n`: a file name may contain anything."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def counted(n: int, noun: str) -> str:
    """`n` and the noun, with an s unless there is exactly one."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
