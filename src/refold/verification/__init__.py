"""Rewritten places compared in float64."""
