"""Where images come from: files, folders, lists, tars and addresses, read and decoded ahead."""
