"""The parts of `refold.optimize`: pipeline, steps, choice of an executor, the optimized module, the report."""
