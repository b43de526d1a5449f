"""Which dimension of its inputs each dimension of a value follows: what lets work be done on a part of a value."""
