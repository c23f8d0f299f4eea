"""Published tables, made again: one module per experiment, with the paper's figures beside ours."""
