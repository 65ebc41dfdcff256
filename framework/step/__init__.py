"""The step in replica context: local sums, one all-reduce, divide once, update."""
