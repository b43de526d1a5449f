"""Facts about the nodes of a graph: arguments, aliasing, purity, layout, recorded values."""
