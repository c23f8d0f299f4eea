"""Text for a terminal."""


def printable(text: str) -> str:
    """`text` on one line: what could break the line or steer the terminal is shown as an escape, as in `\\n`.

    File names may hold anything, even bytes that are no text.
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
