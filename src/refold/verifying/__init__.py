"""The parts of verification: stages, sites, exact tensors, float64 arithmetic, verdicts and accuracy."""
