"""Text that is safe to print: error messages, log lines and tables use it."""


def printable(text: str) -> str:
    """`text` on one line, with control characters escaped like `\\n`: a file name may contain anything."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
