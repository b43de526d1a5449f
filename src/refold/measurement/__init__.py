"""Seconds and bytes of calls, measured in turns."""
