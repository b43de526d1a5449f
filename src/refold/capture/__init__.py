"""Any nn.Module to a graph of its own modules."""
