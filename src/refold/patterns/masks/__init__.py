"""Attention masks as formulas of indices, and what can be proven about them."""
