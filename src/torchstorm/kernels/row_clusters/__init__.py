"""Kernels for long rows on Hopper: a row is split over a cluster of blocks, which exchange partial results."""
