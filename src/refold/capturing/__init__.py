"""The parts of capture: each file holds one step on the way from an nn.Module to a graph people can read."""
