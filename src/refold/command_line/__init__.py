"""The parts of the `refold` command, one idea each; `refold.cli` is the way in."""
