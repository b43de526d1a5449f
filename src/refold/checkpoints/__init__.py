"""State dicts and optimizers, carried through the history of a module."""
