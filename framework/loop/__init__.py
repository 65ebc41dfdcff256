"""The trainer and its loop: an outer loop in Python, an inner one in the graph."""
