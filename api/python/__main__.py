"""`python -m hashseek` is the command `hashseek`."""

from hashseek.api.cli import main

main()
