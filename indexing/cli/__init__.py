"""The subcommands `index` and `search`. `hashseek.api.cli` imports them when they are called."""
