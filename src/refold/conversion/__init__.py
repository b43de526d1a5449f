"""Checkpoints converted as a stream, and plans: which tensor comes from which, by which map."""

from refold.conversion.converter import Conversion, convert
from refold.conversion.layout_tables import Layout, layout_from_text, layout_named
from refold.conversion.tensor_plan import Plan, read_plan

__all__ = ["Conversion", "Layout", "Plan", "convert", "layout_from_text", "layout_named", "read_plan"]
