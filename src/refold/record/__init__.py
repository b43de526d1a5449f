"""What a transformation did to a module: snapshots, their difference, the history, undo."""
