"""Matchers that several transformations share."""
