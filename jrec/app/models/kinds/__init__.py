"""The kinds of models, a file each, which has ``KIND`` and is found by its name; nothing else lists them."""
