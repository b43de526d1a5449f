"""`refold.optimize` in stages: captured, rewritten, verified, chosen, watched."""
